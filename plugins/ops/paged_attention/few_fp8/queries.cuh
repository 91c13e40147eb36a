// What the warpgroups of few_fp8.cu do with a context: its queries, the loop through its tiles, and the sums of weights.
#pragma once

#include "ops/paged_attention/few_fp8/merge.cuh"
#include "ops/paged_attention/long/hand_over.cuh"

// Queries of a part as E4M3 numbers: a row divided by a power of two (chunk_fp8/products.cuh); zeros for missing rows. By the
// threads that compute, eight a row.
DEVICE void put_queries(const Places& places, Columns& columns, const MODEL_TYPE::Storage* q, const Part& part,
                        const int* position_ids, int limit, float key_scale) {
  constexpr int STEP = COMPUTING / 8;
  const int thread = threadIdx.x - THREADS, piece = thread % 8;
  uint4 next[2];
  int next_key;
  const auto load = [&](int row) {
    next[0] = next[1] = {0, 0, 0, 0}, next_key = -1;
    if (row >= part.rows) return;
    const long long token = part.token + row / GROUP;
    const uint4* from = (const uint4*)(q + ((token * HEADS + part.head) * GROUP + row % GROUP) * SIZE) + 2 * piece;
    next[0] = __ldcg(from), next[1] = __ldcg(from + 1), next_key = load_int(position_ids + token);
  };
  load(thread / 8);
#pragma unroll 1
  for (int row = thread / 8; row < ROWS; row += STEP) {
    const uint4 x[2] = {next[0], next[1]};
    const int last_key = min(next_key, limit - 1);
    load(row + STEP);  // while this row's numbers are converted
    const u32* pairs = (const u32*)x;
    float numbers[16], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      numbers[i] = MODEL_TYPE::unpack(u16(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2]));
      most = fmaxf(most, fabsf(numbers[i]));
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    // The exponent of the least power of two times 1.75 that is no less; 448 is 1.75 times 2^8.
    const u32 bits = __float_as_uint(fminf(fmaxf(most, 0x1p-100f), 0x1p126f));
    const u32 power = (bits + 0x1FFFFF) >> 23;
    const float factor = __uint_as_float((262 - power) << 23);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = E4M3::pack_pair(__fmul_rn(numbers[4 * i], factor), __fmul_rn(numbers[4 * i + 1], factor)) |
                 u32(E4M3::pack_pair(__fmul_rn(numbers[4 * i + 2], factor), __fmul_rn(numbers[4 * i + 3], factor))) << 16;
    }
    store_shared(places.queries() + row * 128 + ((piece ^ row & 7) << 4), words[0], words[1], words[2], words[3]);
    if (piece > 0) continue;
    columns.scale(row) = __fmul_rn(key_scale, __uint_as_float((power - 8) << 23));
    columns.top[0][row] = columns.top[1][row] = NO_TOP;
    columns.last_key[row] = last_key;
  }
}

// The end of the work item that begins with a tile, and the work item that ends before one.
DEVICE int unit_end(int tile) { return unit_start(count_units(tile + 1)); }
DEVICE int unit_before(int tile) { return count_units(tile) - 1; }

// The tiles of one context after another, by the threads that compute.
struct Tiles {
  Places places;
  Ring<SLOTS> ring;
  Ring<2> room;  // of weights

  DEVICE explicit Tiles(const Places& places_) : places(places_) {}

  // finish(unit, item): a work item is complete, and its states have been merged: its sums are now.
  template <class Finish>
  DEVICE void attend(Columns& columns, const Own& own, const Share& share, int limit, const Finish& finish) {
    float s[HELD], sums[HELD], item[HELD];
    u32 x[DEEP][4];
    const int full_tiles = (columns.last_key[0] + 1) / KEYS;  // which the first row sees, and all others
    const u32 own_keys = own.warpgroup * (TILE_BYTES / 2);
    int end = share.begin;                   // of the work item
    bool has_raised = false, is_new = true;  // any base, in the chain; whether the chain is its work item's first one
    barrier_wait(places.full_keys(ring.slot), ring.parity);
    start_logits(s, places.keys(ring.slot) + own_keys, places.queries());
    product_wait<0>();
    keep_order(s);
#pragma unroll 1
    for (int tile = share.begin;; ++tile) {
      const bool ends = tile == share.end;  // what was started before is to be finished
      const bool begins = tile % CHAIN == 0 || ends, is_first = tile == end;  // a chain; a work item
      const u32 weights = places.weights(room.slot);
      const Ring<SLOTS> at = ring;
      bool raises = false;
      if (!ends) {
        if (tile >= full_tiles) mask(s, columns, own, tile * KEYS);
        if (is_first) {
          end = unit_end(tile);
          find_tops(s, columns.top[0], own);
          meet_all();
          meet_all();  // bases are there
        }
        const auto load = [&] {  // products of the tile before are done, so registers of its values are free
          product_wait<0>();
          keep_order(sums);
          barrier_wait(places.full_values(at.slot), at.parity);
          load_values(x, places.values(at.slot), own);
        };
        raises = weigh(s, columns, own, weights, load) && !is_first;
        shared_fence();
      } else {
        product_wait<0>();
        keep_order(sums);
      }
      if (begins && tile > share.begin) append_chain(item, sums, columns, own, has_raised, is_new);
      if (ends) break;
      if (begins) has_raised = false, is_new = is_first;
      room.advance(), ring.advance();
      start_next(s, share, tile, own_keys);
      arrange_values(x, own, limit - tile * KEYS);
      if (meet_any(raises)) {  // weights once more, of logits once more
        product_wait<0>();
        start_logits(s, places.keys(at.slot) + own_keys, places.queries());
        product_wait<0>();
        keep_order(s);
        if (tile >= full_tiles) mask(s, columns, own, tile * KEYS);
        find_tops(s, columns.top[1], own);
        meet_all();
        meet_all();
        fade_sums(sums, columns.fade, own.t);
        has_raised = true;
        weigh(s, columns, own, weights, [] {});
        shared_fence();
        start_next(s, share, tile, own_keys);
        meet_all();
      }
      start_sums(sums, x, weights, !begins);
      product_wait<1>();
      keep_order(s);
      if (is_first && tile > share.begin) finish(unit_before(tile), item);  // while products run
    }
    meet_all();  // sums of weights are there
    meet_all();
    finish(unit_before(share.end), item);
  }

 private:
  // Logits of the next tile, if there is one; else of anything.
  DEVICE void start_next(float (&s)[HELD], const Share& share, int tile, u32 own_keys) const {
    if (tile + 1 < share.end) barrier_wait(places.full_keys(ring.slot), ring.parity);
    start_logits(s, places.keys(ring.slot) + own_keys, places.queries());
  }
};

constexpr u32 ONE = 0x38383838;  // four times, in E4M3

// What the first warpgroup does: it brings tiles and adds weights for every row, and a thread each knows a row's states.
DEVICE void add_totals(const Places& places, Columns& columns, const Requests& requests, const volatile Range& range,
                       const volatile Place& place, const Entries& stored, const Cache& cache, const int* block_tables) {
  for (int i = threadIdx.x; i < ONES_BYTES / 16; i += THREADS) store_shared(places.ones() + 16 * i, ONE, ONE, ONE, ONE);
  shared_fence();
  Bringer bringer(places, cache, block_tables, requests, range);
#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) bringer.fetch_next();
  Totals totals;
  const int row = threadIdx.x;
  const auto put = [&] {
    totals.visit([&](int its_row, float total) {
      if (row % 4 == 0) columns.total[its_row] = total;
    });
  };
  Ring<2> room;
  bool is_next = false;
  Contexts at;
  at.start_at_end(requests, range);
#pragma unroll 1
  do {
    const Share share = at.share(range);
    if (share.begin >= share.end) continue;
    ItemState item;
    item.clear();
    float base = 0.0f, total = 0.0f;  // of the chain that is complete
    const auto take = [&] {
      if (row < ROWS) base = columns.base[row], total = columns.total[row];
    };
    const auto append = [&] {
      if (row < ROWS) item.append(base, total);
    };
    const auto finish = [&](int unit) {
      const Kept kept(place);
      if (row < ROWS) finish_row(columns, row, item, kept.merges, stored.states(kept.merges ? 0 : kept.entry_of(unit)));
      item.clear();
    };
    if (is_next) meet_all();
    is_next = true;
    meet_all();
    int end = share.begin;
    bool is_far = false;
#pragma unroll 1
    for (int tile = share.begin; tile < share.end; ++tile) {
      const bool begins = tile % CHAIN == 0, is_first = tile == end;
      totals.wait();
      if (begins) put();
      if (is_first) {
        end = unit_end(tile);
        meet_all();
        take();
        if (row < ROWS) {
          is_far = put_base(columns, row, first_base(columns.top[0][row], columns.scale(row)));
          columns.top[0][row] = NO_TOP;
        }
        meet_all();
        if (tile > share.begin) append(), finish(unit_before(tile));  // while weights are computed
      }
      const bool raises = meet_any(is_far && !is_first);
      if (begins && !is_first) take(), append();
      if (raises) {
        meet_all();
        if (row < ROWS) {
          is_far = raise(columns, row);
          columns.chain_fade[row] = item.fade(columns.base[row]);
        }
        meet_all();
        totals.visit([&](int its_row, float& total) { total = __fmul_rn(total, columns.fade[its_row]); });
        meet_all();
      }
      totals.start(places.weights(room.slot), places.ones(), !begins);
      room.advance();
      bringer.fetch_next();
    }
    totals.wait();
    put();
    meet_all();
    take(), append();
    finish(unit_before(share.end));
    meet_all();
  } while (at.advance(requests, range));
}

// The compute warpgroups of few_fp8.cu: the queries of a context, the loop over its tiles, and the sums of softmax weights.
#pragma once

#include "ops/paged_attention/few_fp8/stored.cuh"
#include "ops/paged_attention/long/hand_over.cuh"

// A part's queries on their way to E4M3 numbers, a row divided by a power of two (chunk_fp8/products.cuh): of the threads that compute,
// eight have a row, of rows STEP apart.
struct Queries {
  static constexpr int STEP = COMPUTING / 8, TIMES = (ROWS + STEP - 1) / STEP;
  u32 pairs[TIMES][8];  // of 16-bit numbers

  struct Piece {
    u32 row, nth;
    bool is_there;

    DEVICE explicit Piece(int time) {
      const u32 thread = thread_from_here() - THREADS;
      row = thread / 8 + time * STEP, nth = thread % 8, is_there = (time + 1) * STEP <= ROWS || row < ROWS;
    }
  };

  // Asks for all of them at once; zeros for missing rows.
  DEVICE void ask(const MODEL_TYPE::Storage* q, const Part& part) {
#pragma unroll
    for (int time = 0; time < TIMES; ++time) {
      const Piece its(time);
      const long long token = part.token + int(its.row / GROUP);
      const uint4* from = (const uint4*)(q + ((token * HEADS + part.head) * GROUP + its.row % GROUP) * SIZE) + 2 * its.nth;
      uint4 x = {0, 0, 0, 0}, y = x;
      if (int(its.row) < part.rows) x = __ldcg(from), y = __ldcg(from + 1);
      u32* to = pairs[time];
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w, to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
    }
  }
  // Converts and stores them; rows of a thread do not wait for each other.
  DEVICE void put(const Places& places, Columns& columns, float key_scale) const {
    float most[TIMES];
    const auto low = [](u32 pair) { return MODEL_TYPE::unpack(u16(pair)); };
    const auto high = [](u32 pair) { return MODEL_TYPE::unpack(u16(pair >> 16)); };
#pragma unroll
    for (int time = 0; time < TIMES; ++time) {
      float largest[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) largest[i] = fmaxf(fabsf(low(pairs[time][i])), fabsf(high(pairs[time][i])));
#pragma unroll
      for (int count = 4; count > 0; count /= 2) {
#pragma unroll
        for (int i = 0; i < count; ++i) largest[i] = fmaxf(largest[i], largest[i + count]);
      }
      most[time] = largest[0];
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int time = 0; time < TIMES; ++time) most[time] = fmaxf(most[time], __shfl_xor_sync(~0u, most[time], lanes));
    }
#pragma unroll
    for (int time = 0; time < TIMES; ++time) {
      // The exponent of the least power of two times 1.75 that is no less; 448 is 1.75 times 2^8.
      const u32 bits = __float_as_uint(fminf(fmaxf(most[time], 0x1p-100f), 0x1p126f));
      const u32 power = (bits + 0x1FFFFF) >> 23;
      const float factor = __uint_as_float((262 - power) << 23);
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 x = pairs[time][2 * i], y = pairs[time][2 * i + 1];
        words[i] = E4M3::pack_pair(__fmul_rn(low(x), factor), __fmul_rn(high(x), factor)) |
                   u32(E4M3::pack_pair(__fmul_rn(low(y), factor), __fmul_rn(high(y), factor))) << 16;
      }
      const Piece its(time);
      if (!its.is_there) continue;
      store_shared(places.queries() + its.row * 128 + ((its.nth ^ its.row & 7) << 4), words[0], words[1], words[2], words[3]);
      columns.scale(its.row) = __fmul_rn(key_scale, __uint_as_float((power - 8) << 23));  // by all eight
    }
  }
};

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
          stores_are_read();  // of the work item before the last one
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
    stores_are_read();
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

// What the first warpgroup does: it brings tiles and adds weights for every row, and a thread each knows a row's states.
DEVICE void add_totals(const Places& places, Columns& columns, const Requests& requests, const volatile Range& range,
                       const volatile Place& place, const Entries& stored, const Cache& cache, const int* block_tables) {
  Bringer bringer(places, cache, block_tables, requests, range, place);
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
  Contexts at;
  at.start_at_end(range);
#pragma unroll 1
  do {
    const Share share = share_of(at, range, place);
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
    meet_adding();  // if the last tile began a chain, others may still take the total of the one before
    put();
    meet_all();
    take(), append();
    finish(unit_before(share.end));
    meet_all();
  } while (at.advance(requests, range));
}

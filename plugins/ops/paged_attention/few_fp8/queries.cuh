// What the warpgroups of few_fp8.cu do with a context: its queries, the loop through its tiles, and the sums of weights.
#pragma once

#include "ops/paged_attention/few_fp8/merge.cuh"
#include "ops/paged_attention/long/hand_over.cuh"

// Queries of a part as E4M3 numbers: a row divided by a power of two (chunk_fp8/products.cuh); zeros for missing rows. By the
// threads that compute, eight a row.
DEVICE void put_queries(const Places& places, Columns& columns, const MODEL_TYPE::Storage* q, const Part& part,
                        const int* position_ids, int limit, float key_scale) {
  const int thread = threadIdx.x - THREADS, piece = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < ROWS; row += COMPUTING / 8) {
    const bool is_there = row < part.rows;
    const long long token = part.token + (is_there ? row : 0) / GROUP;
    uint4 x[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (is_there) {
      const uint4* from = (const uint4*)(q + ((token * HEADS + part.head) * GROUP + row % GROUP) * SIZE) + 2 * piece;
      x[0] = __ldcg(from), x[1] = __ldcg(from + 1);
    }
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
    columns.scale[row] = __fmul_rn(key_scale, __uint_as_float((power - 8) << 23));
    columns.top[0][row] = columns.top[1][row] = NO_TOP;
    columns.item_base[row] = minus_infinity(), columns.item_total[row] = 0.0f;
    columns.last_key[row] = is_there ? min(load_int(position_ids + token), limit - 1) : -1;
  }
}

// A walk through the tiles of a share.
struct Walk {
  int unit, end;  // of the work item

  DEVICE void start(int nth) { unit = nth, end = unit_start(nth + 1); }
  DEVICE void reach(int tile) {
    if (tile == end) start(unit + 1);
  }
};

// The tiles of one context after another, by the threads that compute.
struct Tiles {
  Places places;
  Ring<SLOTS> ring;
  u32 nth = 0;  // tile

  DEVICE explicit Tiles(const Places& places_) : places(places_) {}

  // finish(unit, item, sums, is_item): a chain is complete, and its states have been merged, with is_item its work item's, too: the
  // sums are now.
  template <class Finish>
  DEVICE void attend(Columns& columns, const Own& own, const Share& share, int full_tiles, int limit, const Finish& finish) {
    float s[HELD], sums[HELD], item[HELD];
    u32 x[DEEP][4];
#pragma unroll
    for (int i = 0; i < HELD; ++i) item[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
    Walk at;
    at.start(share.first_unit);
    bool was_first = true;  // the tile before, of its chain
#pragma unroll 1
    for (int tile = share.begin; tile < share.end; ++tile, ++nth) {
      const bool is_first = tile % CHAIN == 0, ends = tile == at.end;  // a chain begins; behind the end of a work item
      const int unit = at.unit;
      at.reach(tile);
      const u32 weights = places.weights(nth % 2);
      barrier_wait(places.full_keys(ring.slot), ring.parity);
      start_logits(s, places.keys(ring.slot) + own.warpgroup * (TILE_BYTES / 2), places.queries());
      // Weights of the tile before times its values. A context's first tile has none before, and nobody uses what comes of it then: a
      // product in a branch would wait for all others.
      start_sums(sums, x, places.weights(nth % 2 ^ 1), !was_first);
      product_wait<1>();
      keep_order(s);
      if (tile >= full_tiles) mask(s, columns, own, tile * KEYS);
      bool raises = false;
      if (is_first) {
        find_tops(s, columns.top[0], own);
      } else {
        raises = weigh(s, columns, own, weights);
        shared_fence();
      }
      product_wait<0>();
      keep_order(sums);
      barrier_wait(places.full_values(ring.slot), ring.parity);
      load_values(x, places.values(ring.slot), own, limit - tile * KEYS);
      ring.advance();
      raises = meet_any(raises);
      if (is_first || raises) {  // weights follow when bases are known
        if (!is_first) {
          find_tops(s, columns.top[1], own);
          meet_all();
        }
        meet_all();
        if (!is_first) fade_sums(sums, columns.fade, own.t);
        weigh(s, columns, own, weights);
        shared_fence();
        meet_all();
        if (is_first && tile > share.begin) finish(unit, item, sums, ends);
      }
      was_first = is_first;
    }
    start_sums(sums, x, places.weights(nth % 2 ^ 1), !was_first);
    product_wait<0>();
    keep_order(sums);
    meet_all();  // sums of weights are there
    meet_all();
    finish(at.unit, item, sums, true);
  }
};

// What the first warpgroup does: one warp brings tiles, all four add weights for every row, and a thread each knows the rows' bases.
DEVICE void add_totals(const Places& places, Columns& columns, const Requests& requests, const volatile Range& range,
                       const volatile Place& place, const Entries& stored, const Cache& cache, const int* block_tables) {
  const bool brings = __any_sync(~0u, threadIdx.x < 32);
  Bringer bringer(places, cache, block_tables, requests, range);
#pragma unroll 1
  for (int i = 0; brings && i < SLOTS; ++i) bringer.fetch_next();
  u32 ones[DEEP][4];
#pragma unroll
  for (int i = 0; i < DEEP; ++i) ones[i][0] = ones[i][1] = ones[i][2] = ones[i][3] = 0x38383838;
  float totals[HELD];
  const int t = threadIdx.x % 4, row = threadIdx.x;
  const auto put = [&] {
    if (threadIdx.x >= 4) return;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) *(float2*)&columns.total[8 * j + 2 * t] = make_float2(totals[4 * j], totals[4 * j + 1]);
  };
  u32 nth = 0;
  bool is_far = false, is_next = false;
  Contexts at;
  at.start_at_end(requests, range);
#pragma unroll 1
  do {
    const Share share = at.share(range);
    if (share.begin >= share.end) continue;
    const auto finish = [&](int unit, float base, bool is_item) {
      const Kept kept(place);
      if (row < ROWS) finish_row(columns, row, base, is_item, kept.merges, stored.states(kept.merges ? 0 : kept.entry_of(unit)));
    };
    if (is_next) meet_all();
    is_next = true;
    meet_all();
    Walk walk;
    walk.start(share.first_unit);
#pragma unroll 1
    for (int tile = share.begin; tile < share.end; ++tile, ++nth) {
      const bool is_first = tile % CHAIN == 0, ends = tile == walk.end;
      const int unit = walk.unit;
      walk.reach(tile);
      product_wait<0>();
      keep_order(totals);
      if (is_first) put();
      const bool raises = meet_any(is_far);
      is_far = is_far && !is_first;
      if (is_first) {
        const float scale = row < ROWS ? columns.scale[row] : 0.0f;
        const float before = row < ROWS ? columns.base[row] : 0.0f;
        if (row < ROWS) {
          const float base = first_base(columns.top[0][row], scale);
          put_base(columns, row, base);
          columns.top[0][row] = NO_TOP;
          is_far = columns.last_key[row] >= 0 && !(fabsf(base) < FAR_BASE);
        }
        meet_all();
        if (tile > share.begin) finish(unit, before, ends);
        meet_all();
      } else if (raises) {
        meet_all();
        if (row < ROWS) raise(columns, row);
        meet_all();
        fade_sums(totals, columns.fade, t);
        meet_all();
      }
      start_sums(totals, ones, places.weights(nth % 2), !is_first);
      if (brings) bringer.fetch_next();
    }
    product_wait<0>();
    keep_order(totals);
    put();
    meet_all();
    finish(walk.unit, row < ROWS ? columns.base[row] : 0.0f, true);
    meet_all();
  } while (at.advance(requests, range));
}

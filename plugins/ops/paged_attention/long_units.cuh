// What the warpgroups of long.cu do: attend to a share's tiles for 64 rows each, and store every work item (`unit`).
#pragma once

#include "ops/paged_attention/long_tiles.cuh"

// Where the work items of a block of rows are stored: of each row its sums and its state.
//
// The sums of 16 dimensions are in the order in which a thread of a product has them: four threads' dimensions 2 t,
// 2 t + 1, and those 8 further.
struct Units {
  float* sums;     // [work items, rows, SIZE]
  float2* states;  // [work items, rows]: largest, total
  int rows;

  DEVICE float4* record(int unit, int row, int block, int thread) const {
    return (float4*)(sums + ((long long)unit * rows + row) * SIZE) + block * 4 + thread;
  }
  DEVICE float2& state(int unit, int row) const { return states[unit * rows + row]; }
};

// What a thread block computes: some tokens of one request, for one KV head.
struct Rows {
  int head, request, first_token, num_rows;  // the first of the step's tokens
  Units units;

  // The row of the block that a computing thread holds in a product; its other is 8 further.
  DEVICE int own(int r, int streams) const { return streams == 2 ? row_of(r) % 64 : row_of(r); }
};

// The queries of a thread's rows as left operands; zeros for missing rows.
DEVICE void load_queries(u32 (&queries)[STEPS][4], const MODEL_TYPE::Storage* q, const Rows& rows,
                         int streams) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.own(r, streams);
    const long long token = rows.first_token + row / GROUP;
    const MODEL_TYPE::Storage* from = q + (token * HEADS + rows.head) * (GROUP * SIZE) +
                                      row % GROUP * SIZE + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32* pair = (const u32*)(from + 16 * i + 8 * half);
        queries[i][2 * half + r] = row < rows.num_rows ? __ldcg(pair) : 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) queries[i][j] = to_inner(queries[i][j]);
  }
}

DEVICE void store_unit(const Rows& rows, int streams, int unit, const float (&acc)[SIZE / 2],
                       const float (&largest)[2], const float (&total)[2]) {
  const int thread = thread_from_here() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.own(r, streams);
    if (row >= rows.num_rows) continue;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float* x = &acc[8 * i + 2 * r];
      __stcg(rows.units.record(unit, row, i, thread), make_float4(x[0], x[1], x[4], x[5]));
    }
    if (thread == 0) __stcg(&rows.units.state(unit, row), make_float2(largest[r], total[r]));
  }
}

// Attends to the tiles of the thread's warpgroup. From full_tiles on rows see keys up to last_key only.
DEVICE void attend_share(const Tiles& shared, const Share& share, const Rows& rows,
                         const u32 (&queries)[STEPS][4], int full_tiles, const int (&last_key)[2],
                         float scale) {
  const int streams = share.streams, nth = streams == 2 ? threadIdx.x / 128 - 1 : 0;
  Walk at;
  at.start(share.first_unit + nth);
  if (at.tile >= share.end) return;
  const bool is_idle = rows.own(0, streams) / 16 * 16 >= rows.num_rows;  // the warp's rows are all missing
  State state;
  float s[32];
  u32 weights[16];
  Softening softening;
  const auto find_base = [&] {
    if (at.tile < full_tiles) {
      softening.find_base<false>(state, s, {}, scale);
    } else {
      int seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = last_key[r] - at.tile * KEYS;
      softening.find_base<true>(state, s, seen, scale);
    }
  };
  const auto weigh = [&] {
    softening.weigh(s, weights, scale);
    softening.add_weights(state);
  };
  bool is_first = true;  // tile of its work item
  int key_slot = nth, value_slot = nth;
  u32 key_parity = 0, value_parity = 0;
  const auto advance = [&](int& slot, u32& parity) {
    slot += streams;
    if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
  };
  const auto multiply_keys = [&] {
    wait_for_operand(shared.full_keys(key_slot), key_parity);
    start_logits(s, queries, shared.keys(key_slot));
  };
  const auto release_keys = [&] {
    keep_order(s);
    release(shared.empty_keys(key_slot));
    advance(key_slot, key_parity);
  };
  const auto multiply_values = [&] {
    wait_for_operand(shared.full_values(value_slot), value_parity);
    start_values(state, weights, shared.values(value_slot), !is_first);
  };
  const auto release_values = [&] {
    keep_order(state.acc);
    release(shared.empty_values(value_slot));
    advance(value_slot, value_parity);
  };
#pragma unroll
  for (int i = 0; i < 16; ++i) weights[i] = 0;
  state.clear_states();
  multiply_keys();
  product_wait<0>();
  release_keys();
  if (!is_idle) {
    find_base();
    weigh();
  }
  int unit = at.unit;
#pragma unroll 1
  for (at.next(streams); at.tile < share.end; at.next(streams)) {
    multiply_keys();
    multiply_values();
    product_wait<1>();
    release_keys();
    is_first = at.unit != unit;
    float largest[2], total[2];  // of the work item whose values are being added
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = state.largest[r], total[r] = state.total[r];
    if (is_first) state.clear_states();
    if (!is_idle) find_base();
    product_wait<0>();
    release_values();
    if (is_first) {
      store_unit(rows, streams, unit, state.acc, largest, total);
      unit = at.unit;
    }
    if (!is_idle) {
      weigh();
      if (!is_first) softening.fade_values(state);
    }
  }
  multiply_values();
  product_wait<0>();
  release_values();
  store_unit(rows, streams, unit, state.acc, state.largest, state.total);
}

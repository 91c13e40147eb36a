// How a warp of verification.cu computes a tile: some of its columns at a time.
#pragma once

#include "ops/paged_attention/verification/merge.cuh"

// C blocks of a warp's columns from FIRST on, in a work item.
template <int FIRST, int C>
struct ColumnsOf {
  StateOf<STEPS, C> state;
  u32 weights[C][BLOCKS][2];

  // Multiplies a tile's keys at `at`, and calls `release` when these have been read.
  template <class Release>
  DEVICE void weigh(const Shared& shared, u32 at, float scale, int tile, bool is_first, int all_see,
                    const Release& release) {
    Queries own;
    own.start(shared.queries + FIRST * (STEPS * 256));
    LogitsOf<BLOCKS, C> logits;
    multiply_keys(logits, own, TileKeys(at));
    if (FIRST + C == COLUMN_BLOCKS) release();
    int last[C][2];
#pragma unroll
    for (int n = 0; n < C; ++n) {
      const int2 its = *(const int2*)(shared.gathered->seen + 8 * (FIRST + n) + lane_id() % 4 * 2);
      last[n][0] = its.x - tile * KEYS, last[n][1] = its.y - tile * KEYS;
    }
    const bool is_masked = !TREE && (tile + 1) * KEYS - 1 > all_see;
    if (TREE && is_first) state.clear();
    soften(state, logits, weights, last, scale, is_masked, is_first);
  }
  DEVICE void add_values(u32 at) {
    multiply_values(state.sums, weights, TileKeys(at + TILE_BYTES));
  }
  DEVICE void store(const Shared& shared) const {
    store_unit(shared, state, thread_from_here() / 32, FIRST);
  }
};
// A warp has the logits of these at once, and then of the others, so that registers are left for sums.
constexpr int SOME = COLUMN_BLOCKS < 2 ? COLUMN_BLOCKS : 2;
constexpr bool HAS_OTHERS = COLUMN_BLOCKS > SOME;
typedef ColumnsOf<0, SOME> FirstColumns;
typedef ColumnsOf<SOME, HAS_OTHERS ? COLUMN_BLOCKS - SOME : 1> OtherColumns;
static_assert(8 * SOME * ROW_BYTES <= TILE_BYTES, "the first lie where a tile's keys were");

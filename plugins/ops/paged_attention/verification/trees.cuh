// Trees of tokens in verification.cu: tree/paths.cuh says how keys after the root are found.
//
// One warp for each block of 8 columns (ROWS / 8 warps, besides the warps for work items) continues the root's work item
// from the root's tile on.
#pragma once

#include "ops/paged_attention/verification/columns.cuh"

constexpr int TAIL_THREADS = TAILS > 0 ? 32 * TAILS : 32;

// What store_unit has stored, of one block of columns.
DEVICE void load_unit(ColumnState& state, const Shared& shared, int unit, int block) {
  const int lane = lane_id();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane % 4 * 2 + c;
    Floats<2> its;
    load_floats(its, shared.state(unit, row));
    state.largest[0][c] = its.x[0];
    if (bool(lane & 4) == bool(c)) state.total[0] = its.x[1];
    const u32 from = shared.sums(unit, row) + lane / 4 * (IS_BYTE ? 8 : 4);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float &first = state.sums[0][i][c], &second = state.sums[0][i][c + 2];
      if (IS_BYTE) {
        load_floats(its, from + turned(row, i * 64));
        first = its.x[0], second = its.x[1];
      } else {
        first = load_float(from + turned(row, i * 64));
        second = load_float(from + turned(row, i * 64 + 32));
      }
    }
  }
}

struct Tail : TreePaths {
  int nth;  // the block of columns
  int page;
  ColumnTokens tokens;

  DEVICE Tail() : nth(thread_from_here() / 32 - UNITS) {}
  // Requests what says where keys are; they are brought later (`bring`), so that nobody waits for it.
  DEVICE void begin(const Numbers& now, const int* table, int table_stride, const int* positions,
                    int first_token, int num_tokens) {
    start(now);
    page = load_page(table, table_stride);
    tokens = load_tokens(positions, first_token + nth * BLOCK_TOKENS, num_tokens);
  }
  // Brings keys and values, and looks up the tokens' paths.
  DEVICE void bring(const Shared& shared, const KV_TYPE::Storage* cache, int head, int table_stride,
                    int num_pages, const StepTrees& trees, int first_token) const {
    if (nth == 0) clear_row(shared.window);
    copy_window<TAIL_THREADS>(shared.window, threadIdx.x - 32 * UNITS, cache, head, 0, page,
                              table_stride, num_pages);
    const int own = nth * BLOCK_TOKENS;
    find_rows(shared.rows, tokens, trees, first_token + own, own);
  }
  DEVICE void meet() const {  // the warps of the tail
    if (TAILS == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(32 * (TAILS > 0 ? TAILS : 1)) : "memory");
    }
  }
  DEVICE void add(ColumnState& state, const Shared& shared, int tile, int end, float scale,
                  bool is_first) const {
    Queries queries;
    queries.at = shared.queries + nth * (STEPS * 256) + lane_id() * 8;
    add_tiles(state, shared.window, queries, shared.gathered->seen + 8 * nth,
              shared.rows + nth * BLOCK_TOKENS, tile, end, scale, is_first);
  }

  // Whether the thread block has a work item of the tail, in some round.
  DEVICE bool is_hosted(int rank) const {
    static_assert(WINDOW_TILES == 2, "two work items at the most");
    const int unit = root_unit(), next = count_units(first / KEYS + WINDOW_TILES) - 1;
    return unit / UNITS % SPLITS == rank || next / UNITS % SPLITS == rank;
  }
  // Finishes the tail's work items, of those of a round. Nothing is kept for it in registers, of which the other warps
  // have none to spare.
  static DEVICE void finish(const Shared& shared, int start, int units, int tiles, float scale) {
    Tail tail;
    tail.start(shared.gathered->numbers);
    tail.add_units(shared, start, units, tiles, scale);
  }
  DEVICE void add_units(const Shared& shared, int start, int units, int tiles, float scale) const {
    const int first_tile = first / KEYS, own = root_unit();
#pragma unroll 1
    for (int unit = max(own, start); unit < min(min(own + WINDOW_TILES, start + UNITS), units); ++unit) {
      const bool goes_on = unit_start(unit) < first_tile;  // where a warp has stopped
      ColumnState state;
      state.clear();
      if (goes_on) {
        stopped_sync();
        load_unit(state, shared, unit - start, nth);
      }
      const int end = min(min(unit_start(unit + 1), tiles), first_tile + WINDOW_TILES);
      add(state, shared, max(unit_start(unit), first_tile), end, scale, !goes_on);
      store_unit(shared, state, unit - start, nth);
    }
  }
  // The root's work item is stored up to the root's tile.
  static DEVICE void stopped() {
    asm volatile("bar.arrive 2, %0;" ::"n"(32 * (TAILS + 1)) : "memory");
  }
  static DEVICE void stopped_sync() {
    asm volatile("bar.sync 2, %0;" ::"n"(32 * (TAILS + 1)) : "memory");
  }
};

// Trees of tokens in long.cu: keys from the root's tile on, for each token those of its path (tree_paths.cuh). All
// warps of the last thread block of a context process them, 8 rows at a time, behind the tiles before the root's.
#pragma once

#include "ops/paged_attention/long_merge.cuh"
#include "ops/paged_attention/tree_columns.cuh"

constexpr int MOST_BLOCKS = 128 / 8;  // of columns
constexpr int LINE_BYTES = STEPS * 256;  // of the queries of one

// Shared memory behind what merging needs.
struct Tail {
  static constexpr int AT = (Tiles::FACTORS_AT + MERGE_BYTES + 1023) / 1024 * 1024;
  static constexpr int QUERIES_AT = AT + 2 * columns::WINDOW_BYTES;
  static constexpr int ROWS_AT = QUERIES_AT + MOST_BLOCKS * LINE_BYTES;
  static constexpr int SEEN_AT = ROWS_AT + TOKENS * columns::WINDOW_KEYS;
  static constexpr int BYTES = SEEN_AT + 128 * sizeof(int);

  columns::TreePaths paths;
  u32 window, queries;
  u8 (*table)[columns::WINDOW_KEYS];  // where each token has its keys in the window
  int* seen;                          // the last key of each row

  DEVICE Tail(u8* memory, const Numbers& numbers)
      : window(shared_address(memory) + AT),
        queries(shared_address(memory) + QUERIES_AT),
        table((u8(*)[columns::WINDOW_KEYS])(memory + ROWS_AT)),
        seen((int*)(memory + SEEN_AT)) {
    paths.start(numbers);
  }
};
static_assert(Tail::BYTES <= SHARED_BYTES, "room for all of it");

// A step's trees, and where tokens and keys are.
struct Sources {
  const MODEL_TYPE::Storage* q;
  const KV_TYPE::Storage* cache;
  const int* position_ids;
  columns::StepTrees trees;
  const int* table;  // the request's pages
  int table_stride, num_pages, num_tokens;
};

// Brings keys, values and queries, and looks up paths; by the computing warps.
DEVICE void bring_tail(const Tail& tail, const Rows& rows, const Sources& from, int first_token) {
  const int thread = threadIdx.x - THREADS, warp = thread / 32, lane = lane_id();
  const int page = tail.paths.load_page(from.table, from.table_stride);
  if (warp == 0) columns::TreePaths::clear_row(tail.window);
  tail.paths.copy_window<COMPUTING>(tail.window, thread, from.cache, rows.head, page,
                                    from.table_stride, from.num_pages);
  const Item item = {rows.head, rows.first_token, rows.num_rows, 0, 0, 0};
#pragma unroll 1
  for (int block = warp; 8 * block < rows.num_rows; block += COMPUTING / 32) {
    const int nth = 8 * block / GROUP;  // of the columns' tokens
    const columns::ColumnTokens tokens =
        tail.paths.load_tokens(from.position_ids, first_token + nth, from.num_tokens);
    tail.paths.find_rows(tail.table, tokens, from.trees, first_token + nth, nth);
    stage_columns(tail.queries + block * LINE_BYTES, from.q, item, block);
    if (lane < 8) {
      const int row = 8 * block + lane, token = rows.first_token + row / GROUP;
      const bool is_real = row < rows.num_rows && token < from.num_tokens;
      const int last = tail.paths.numbers.limit - 1;
      tail.seen[row] = is_real ? min(load_int(from.position_ids + token), last) : -1;
    }
  }
  columns::wait_for_copies<0>();
}

// A work item of 8 rows, as Units has it.
template <class Use>
DEVICE void each_pair(const Rows& rows, int unit, int block, const Use& use) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c, pair = lane_id() / 4;  // of 16 dimensions
    if (row >= rows.num_rows) continue;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float2* at = (float2*)rows.units.record(unit, row, i, pair % 4) + pair / 4;
      use(at, i, c);
    }
  }
}

DEVICE void load_columns(columns::ColumnState& state, const Rows& rows, int unit, int block) {
  each_pair(rows, unit, block, [&](const float2* at, int i, int c) {
    const float2 x = __ldcg(at);
    state.sums[0][i][c] = x.x, state.sums[0][i][c + 2] = x.y;
  });
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c;
    if (row >= rows.num_rows) continue;
    const float2 its = __ldcg(&rows.units.state(unit, row));
    state.largest[0][c] = its.x;
    if (bool(lane_id() & 4) == bool(c)) state.total[0] = its.y;
  }
}

DEVICE void store_columns(const columns::ColumnState& state, const Rows& rows, int unit, int block) {
  each_pair(rows, unit, block, [&](float2* at, int i, int c) {
    __stcg(at, make_float2(state.sums[0][i][c], state.sums[0][i][c + 2]));
  });
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c;
    if (lane_id() >= 4 || row >= rows.num_rows) continue;
    const float total = c == 0 ? state.total[0] : other;
    __stcg(&rows.units.state(unit, row), make_float2(state.largest[0][c], total));
  }
}

// Attends to the keys from the root's tile on: the `nth` of all warps. `end`: of all tiles.
DEVICE void attend_tail(const Tail& tail, const Rows& rows, int nth, int end, float scale) {
  const int tiles = tail.paths.first / KEYS, root_unit = tail.paths.root_unit();
#pragma unroll 1
  for (int block = nth; 8 * block < rows.num_rows; block += ALL_THREADS / 32) {
    columns::Queries queries;
    queries.start(tail.queries + block * LINE_BYTES);
#pragma unroll 1
    for (int unit = root_unit, tile = tiles; tile < end; ++unit) {
      const bool goes_on = unit_start(unit) < tile;  // behind tiles before the root's
      const int unit_end = min(unit_start(unit + 1), end);
      columns::ColumnState state;
      state.clear();
      if (goes_on) load_columns(state, rows, unit, block);
      tail.paths.add_tiles(state, tail.window, queries, tail.seen + 8 * block,
                           tail.table + 8 * block / GROUP, tile, unit_end, scale, !goes_on);
      store_columns(state, rows, unit, block);
      tile = unit_end;
    }
  }
}

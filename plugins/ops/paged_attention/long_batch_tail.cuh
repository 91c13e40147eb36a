// Trees of tokens in long_batch.cu: keys from the root's tile on, for each token those of its path (tree_paths.cuh). All
// warps of the last thread block of a context process them, 8 rows at a time, when its tiles before the root's are done;
// what they need lies where those were.
#pragma once

#include "ops/paged_attention/long_batch_merge.cuh"

constexpr int LINE_BYTES = STEPS * 256;  // of the queries of 8 rows

// A step's trees, and where tokens and keys are.
struct Sources {
  const MODEL_TYPE::Storage* q;
  const KV_TYPE::Storage* cache;
  const int* position_ids;
  StepTrees trees;
  const int* table;  // the request's pages
  int table_stride, num_pages, num_tokens;
};

// A work item that is being processed, as merging reads it; the window of keys and values; queries of warps; where each
// token has its keys in the window; the last key of each row.
struct Tail {
  static constexpr int STATES_AT = Shared::FREE_AT + ROWS * SIZE * 4;
  static constexpr int FACTORS_AT = STATES_AT + ROWS * 8;
  static constexpr int SEEN_AT = FACTORS_AT + ROWS * 8;
  static constexpr int QUERIES_AT = SEEN_AT + ROWS * 4;
  static constexpr int WINDOW_AT = (QUERIES_AT + ROWS / 8 * LINE_BYTES + 127) / 128 * 128;
  static constexpr int TABLE_AT = WINDOW_AT + 2 * WINDOW_BYTES;
  static constexpr int BYTES = TABLE_AT + ROWS / GROUP * WINDOW_KEYS;

  TreePaths paths;
  u32 base, window, queries;
  u8 (*table)[WINDOW_KEYS];
  int* seen;

  DEVICE Tail(u8* memory, const Numbers& numbers)
      : base(shared_address(memory)),
        window(base + WINDOW_AT),
        queries(base + QUERIES_AT),
        table((u8(*)[WINDOW_KEYS])(memory + TABLE_AT)),
        seen((int*)(memory + SEEN_AT)) {
    paths.start(numbers);
  }
  DEVICE u32 four(int b, int j, int thread) const {
    return base + Shared::FREE_AT + ((b * (ROWS / 8) + j) * WARPGROUP + thread) * 16;
  }
  DEVICE u32 state(int row) const { return base + STATES_AT + row * 8; }
  DEVICE u32 factors(int row) const { return base + FACTORS_AT + row * 8; }
};
static_assert(Tail::BYTES <= SHARED_BYTES, "room for all of it");

// Queries of a warp's 8 rows in the layout of its products; zeros for missing rows.
DEVICE void stage_columns(u32 target, const MODEL_TYPE::Storage* q, const Part& part, int block) {
  const int row = 8 * block + lane_id() / 4;
  const long long its = (long long)(part.first_token + row / GROUP) * HEADS + part.head;
  const MODEL_TYPE::Storage* from = q + its * (GROUP * SIZE) + row % GROUP * SIZE;
  Queries queries;
  queries.start(target);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    u32 x[2] = {0, 0};
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      if (row < part.num_rows) x[pair] = __ldcg((const u32*)(from + query_dimension(i, pair)));
    }
    queries.store(0, i, to_inner(x[0]), to_inner(x[1]));
  }
}

// Brings keys, values and queries, and looks up paths.
DEVICE void bring_tail(const Tail& tail, const Part& part, const Sources& from, int first_token) {
  const int warp = threadIdx.x / 32, lane = lane_id();
  const int page = tail.paths.load_page(from.table, from.table_stride);
  if (warp == 0) TreePaths::clear_row(tail.window);
  tail.paths.copy_window<THREADS>(tail.window, threadIdx.x, from.cache, part.head, page,
                                  from.table_stride, from.num_pages);
#pragma unroll 1
  for (int block = warp; 8 * block < part.num_rows; block += WARPS) {
    const int nth = 8 * block / GROUP;  // of the columns' tokens
    const ColumnTokens tokens =
        tail.paths.load_tokens(from.position_ids, first_token + nth, from.num_tokens);
    tail.paths.find_rows(tail.table, tokens, from.trees, first_token + nth, nth);
    stage_columns(tail.queries + block * LINE_BYTES, from.q, part, block);
    if (lane < 8) {
      const int row = 8 * block + lane, token = part.first_token + row / GROUP;
      const bool is_real = row < part.num_rows && token < from.num_tokens;
      const int last = tail.paths.numbers.limit - 1;
      tail.seen[row] = is_real ? min(load_int(from.position_ids + token), last) : -1;
    }
  }
  wait_for_copies<0>();
}

// A work item of 8 rows. A warpgroup's thread has four of its sums, one of block i of dimensions of a warp's lane.
DEVICE u32 four_of_block(const Tail& tail, int i, int block) {
  return tail.four(i / 4, block, i % 4 * 32 + lane_id());
}
DEVICE void load_columns(ColumnState& state, const Tail& tail, int block) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const float4 x = load_four(four_of_block(tail, i, block));
    state.sums[0][i][0] = x.x, state.sums[0][i][1] = x.y;
    state.sums[0][i][2] = x.z, state.sums[0][i][3] = x.w;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float2 its = load_pair_of(tail.state(8 * block + lane_id() % 4 * 2 + c));
    state.largest[0][c] = its.x;
    if (bool(lane_id() & 4) == bool(c)) state.total[0] = its.y;
  }
}
DEVICE void store_columns(const ColumnState& state, const Tail& tail, int block) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const float* x = state.sums[0][i];
    store_four(four_of_block(tail, i, block), {x[0], x[1], x[2], x[3]});
  }
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
  if (lane_id() >= 4) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    store_pair_of(tail.state(8 * block + lane_id() * 2 + c),
                  {state.largest[0][c], c == 0 ? state.total[0] : other});
  }
}

// Merges or stores the work item that the tail holds; by all threads.
DEVICE void finish_tail(const Tail& tail, const Shared& shared, const Part& part, int unit) {
  const int row = threadIdx.x, thread = threadIdx.x % WARPGROUP;
  if (row < part.num_rows) {
    const float2 its = load_pair_of(tail.state(row));
    if (part.merges) {
      float2 merged = {minus_infinity(), 0.0f};
      if (unit > 0) merged = load_pair_of(shared.state(row));
      const Factors by = append_state(merged, its);
      store_pair_of(shared.state(row), merged);
      store_pair_of(tail.factors(row), {by.left, by.right});
    } else {
      __stcg(part.entries.state(part.entries.of(unit), row), its);
    }
  }
  __syncthreads();
  each_four(part, [&](int b, int j) {
    const float4 x = load_four(tail.four(b, j, thread));
    if (!part.merges) {
      __stcg(part.entries.four(part.entries.of(unit), b, j, thread), x);
      return;
    }
    const float2 even = load_pair_of(tail.factors(8 * j + thread % 4 * 2));
    const float2 odd = load_pair_of(tail.factors(8 * j + thread % 4 * 2 + 1));
    const u32 at = shared.merged(b, j, thread);
    float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
    if (unit > 0) merged = load_four(at);
    store_four(at, append_four(merged, x, {even.x, even.y}, {odd.x, odd.y}));
  });
  __syncthreads();
}

// Attends to the keys from the root's tile on; by all threads. `is_held`: the warpgroup has sums and state of the root's
// work item, of its tiles before the root's. `end`: of all tiles.
DEVICE void attend_tail(const Tail& tail, const Shared& shared, const Stream& its, bool is_held,
                        const Sums& sums, const RowState& row, const Sources& from, int first_token,
                        int end, float scale) {
  const Part& part = its.part;
  __syncthreads();  // the tiles are done
  if (is_held) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
      for (int b = 0; b < 2; ++b) store_four(tail.four(b, j, its.thread), four_of(sums, b, j));
    }
    if (its.has_row()) store_pair_of(tail.state(its.place), {row.largest, row.total});
  }
  bring_tail(tail, part, from, first_token);
  __syncthreads();
#pragma unroll 1
  for (int unit = tail.paths.root_unit(), tile = tail.paths.first / KEYS; tile < end; ++unit) {
    const bool goes_on = unit_start(unit) < tile;  // behind tiles before the root's
    const int unit_end = min(unit_start(unit + 1), end);
#pragma unroll 1
    for (int block = threadIdx.x / 32; 8 * block < part.num_rows; block += WARPS) {
      Queries queries;
      queries.start(tail.queries + block * LINE_BYTES);
      ColumnState state;
      state.clear();
      if (goes_on) load_columns(state, tail, block);
      tail.paths.add_tiles(state, tail.window, queries, tail.seen + 8 * block,
                           tail.table + 8 * block / GROUP, tile, unit_end, scale, !goes_on);
      store_columns(state, tail, block);
    }
    tile = unit_end;
    __syncthreads();
    finish_tail(tail, shared, part, unit);
  }
}

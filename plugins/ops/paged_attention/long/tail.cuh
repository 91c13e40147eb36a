// Trees of tokens in long.cu: keys from the root's tile on, for each token those of its path (tree/paths.cuh). The compute
// warps of a context's last thread block process them, 8 rows at a time, after the tiles before the root's tile; their
// data replaces those tiles in shared memory.
#pragma once

#include "ops/paged_attention/long/merge.cuh"
#include "ops/paged_attention/tree/columns.cuh"

constexpr int MOST_ROWS_OF_IT = 64 * WARPGROUPS;
constexpr int LINE_BYTES = STEPS * 256;  // of the queries of 8 rows
constexpr int ROW_BYTES = SIZE * 4 + 16;  // of a row's sums; rows that are read together fall on other banks

// A work item that is being processed; the window of keys and values; queries of warps; where each token has its keys in
// the window; the last key of each row.
struct Tail {
  static constexpr int STATES_AT = MOST_ROWS_OF_IT * ROW_BYTES;
  static constexpr int SEEN_AT = STATES_AT + MOST_ROWS_OF_IT * 8;
  static constexpr int QUERIES_AT = SEEN_AT + MOST_ROWS_OF_IT * 4;
  static constexpr int WINDOW_AT = QUERIES_AT + MOST_ROWS_OF_IT / 8 * LINE_BYTES;
  static constexpr int TABLE_AT = WINDOW_AT + 2 * columns::WINDOW_BYTES;
  static constexpr int BYTES = TABLE_AT + TOKENS * columns::WINDOW_KEYS;
  static_assert(WINDOW_AT % 128 == 0, "lines of keys");

  columns::TreePaths paths;
  u32 base, window, queries;
  u8 (*table)[columns::WINDOW_KEYS];
  int* seen;

  DEVICE Tail(u8* memory, const Numbers& numbers)
      : base(shared_address(memory)),
        window(base + WINDOW_AT),
        queries(base + QUERIES_AT),
        table((u8(*)[columns::WINDOW_KEYS])(memory + TABLE_AT)),
        seen((int*)(memory + SEEN_AT)) {
    paths.start(numbers);
  }
  // As in Entries.
  DEVICE u32 record(int row, int block, int thread) const {
    return base + row * ROW_BYTES + (block * 4 + thread) * 16;
  }
  DEVICE u32 state(int row) const { return base + STATES_AT + row * 8; }
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

DEVICE void store_pair_of(u32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
DEVICE float2 load_pair_of(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// Brings keys, values and queries, and looks up paths.
DEVICE void bring_tail(const Tail& tail, const Part& part, const Sources& from, int first_token) {
  const int thread = threadIdx.x - THREADS, warp = thread / 32, lane = lane_id();
  const int page = tail.paths.load_page(from.table, from.table_stride);
  if (warp == 0) columns::TreePaths::clear_row(tail.window);
  tail.paths.copy_window<COMPUTING>(tail.window, thread, from.cache, part.head, 0, page,
                                    from.table_stride, from.num_pages);
  const Item item = {part.head, part.token, part.rows, 0, 0, 0};
#pragma unroll 1
  for (int block = warp; 8 * block < part.rows; block += COMPUTING / 32) {
    const int nth = 8 * block / GROUP;  // of the columns' tokens
    const columns::ColumnTokens tokens =
        tail.paths.load_tokens(from.position_ids, first_token + nth, from.num_tokens);
    tail.paths.find_rows(tail.table, tokens, from.trees, first_token + nth, nth);
    stage_columns(tail.queries + block * LINE_BYTES, from.q, item, block);
    if (lane < 8) {
      const int row = 8 * block + lane, token = part.token + row / GROUP;
      const bool is_real = row < part.rows && token < from.num_tokens;
      const int last = tail.paths.numbers.limit - 1;
      tail.seen[row] = is_real ? min(load_int(from.position_ids + token), last) : -1;
    }
  }
  wait_for_copies<0>();
}

// A work item of 8 rows: a warp's lane has of each 16 dimensions two pairs, of two columns.
template <class Use>
DEVICE void each_pair(const Tail& tail, int block, const Use& use) {
  const int pair = lane_id() / 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) use(tail.record(row, i, pair % 4) + pair / 4 * 8, i, c);
  }
}
DEVICE void load_columns(columns::ColumnState& state, const Tail& tail, int block) {
  each_pair(tail, block, [&](u32 at, int i, int c) {
    const float2 x = load_pair_of(at);
    state.sums[0][i][c] = x.x, state.sums[0][i][c + 2] = x.y;
  });
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float2 its = load_pair_of(tail.state(8 * block + lane_id() % 4 * 2 + c));
    state.largest[0][c] = its.x;
    if (bool(lane_id() & 4) == bool(c)) state.total[0] = its.y;
  }
}
DEVICE void store_columns(const columns::ColumnState& state, const Tail& tail, int block) {
  each_pair(tail, block, [&](u32 at, int i, int c) {
    store_pair_of(at, state.sums[0][i][c], state.sums[0][i][c + 2]);
  });
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
  if (lane_id() >= 4) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    store_pair_of(tail.state(8 * block + lane_id() * 2 + c), state.largest[0][c],
                  c == 0 ? state.total[0] : other);
  }
}

// A work item between the products of 64 rows and the columns of warps.
template <class Use>
DEVICE void each_four(const Tail& tail, const Use& use) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) use(tail.record(row_of(r), i, threadIdx.x % 4), i, r);
  }
}
DEVICE void put_unit(const Tail& tail, const State& unit) {
  each_four(tail, [&](u32 at, int i, int r) {
    const float* x = &unit.acc[8 * i + 2 * r];
    store_pair_of(at, x[0], x[1]), store_pair_of(at + 8, x[4], x[5]);
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (threadIdx.x % 4 == 0) store_pair_of(tail.state(row_of(r)), unit.largest[r], unit.total[r]);
  }
}
DEVICE void take_unit(const Tail& tail, State& unit) {
  each_four(tail, [&](u32 at, int i, int r) {
    float* x = &unit.acc[8 * i + 2 * r];
    const float2 low = load_pair_of(at), high = load_pair_of(at + 8);
    x[0] = low.x, x[1] = low.y, x[4] = high.x, x[5] = high.y;
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 its = load_pair_of(tail.state(row_of(r)));
    unit.largest[r] = its.x, unit.total[r] = its.y;
  }
}

// Attends to the keys from the root's tile on. `is_held`: `unit` is the root's work item, of its tiles before the root's.
// `end`: of all tiles.
DEVICE void attend_tail(const Tail& tail, const Part& part, bool is_held, State& all, State& unit,
                        const Sources& from, int first_token, int end, float scale) {
  meet_computing();  // the tiles are done
  if (is_held) put_unit(tail, unit);
  bring_tail(tail, part, from, first_token);
  meet_computing();
#pragma unroll 1
  for (int nth = tail.paths.root_unit(), tile = tail.paths.first / KEYS; tile < end; ++nth) {
    const bool goes_on = unit_start(nth) < tile;  // behind tiles before the root's
    const int unit_end = min(unit_start(nth + 1), end);
#pragma unroll 1
    for (int block = (threadIdx.x - THREADS) / 32; 8 * block < part.rows; block += COMPUTING / 32) {
      columns::Queries queries;
      queries.start(tail.queries + block * LINE_BYTES);
      columns::ColumnState state;
      state.clear();
      if (goes_on) load_columns(state, tail, block);
      tail.paths.add_tiles(state, tail.window, queries, tail.seen + 8 * block,
                           tail.table + 8 * block / GROUP, tile, unit_end, scale, !goes_on);
      store_columns(state, tail, block);
    }
    tile = unit_end;
    meet_computing();
    take_unit(tail, unit);
    finish_unit(part, nth, all, unit, unit.weighed());
    meet_computing();
  }
}

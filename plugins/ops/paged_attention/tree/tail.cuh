// The tail warps of tree.cu: they process the keys from the root's tile on, 8 rows each.
#pragma once

#include "ops/paged_attention/tree/columns.cuh"

constexpr int TAIL_WARPS = 8, TAIL_THREADS = 32 * TAIL_WARPS;  // a warp for 8 of 64 rows
constexpr int ROW_FLOATS = OWN_SIZE + 8;  // of a row's sums: rows that are stored at once fall on different banks

// A work item's rows while they pass between the computing warps and the tail's: its sums, largest and total.
struct Handed {
  float sums[64][ROW_FLOATS];
  float2 states[64];
};

// Shared memory behind what chunk/load.cuh has.
struct TailShared {
  static constexpr int AT = (Shared::CLAIM_AT + 32 + 1023) / 1024 * 1024;
  static constexpr int HANDED_AT = AT + 2 * columns::WINDOW_BYTES;
  static constexpr int ROWS_AT = HANDED_AT + sizeof(Handed);
  static constexpr int SEEN_AT = ROWS_AT + TOKENS * columns::WINDOW_KEYS;
  static constexpr int BYTES = SEEN_AT + 64 * sizeof(int);
  static constexpr int SCALES_AT = AT - 16;

  u32 window;
  Handed& handed;
  u8 (*rows)[columns::WINDOW_KEYS];  // where each token has its keys in the window
  int* seen;                         // the last key of each row
  float2& scales;                    // `Sources::scales`

  DEVICE explicit TailShared(u8* memory)
      : window(shared_address(memory) + AT),
        handed(*(Handed*)(memory + HANDED_AT)),
        rows((u8(*)[columns::WINDOW_KEYS])(memory + ROWS_AT)),
        seen((int*)(memory + SEEN_AT)),
        scales(*(float2*)(memory + SCALES_AT)) {}
};
static_assert(TailShared::BYTES <= SHARED_BYTES, "room for all of it");

// ---- meetings of the computing warps and the tail's ----

enum Meeting { TAIL = 2, UNIT_STOPPED, UNIT_DONE, UNIT_MERGED };
template <int MEETING, int COUNT = 128 + TAIL_THREADS>
DEVICE void meet() {
  asm volatile("barrier.sync %0, %1;" ::"n"(MEETING), "n"(COUNT) : "memory");
}
template <int MEETING>
DEVICE void arrive() {
  asm volatile("barrier.arrive %0, %1;" ::"n"(MEETING), "n"(128 + TAIL_THREADS) : "memory");
}

// What a thread block computes: some tokens of one request, for one KV head.
struct Part {
  columns::TreePaths paths;
  int head, request, first_token;
  int nth;               // of the values' parts
  int tiles, all_tiles;  // before the root's; that any of the tokens sees

  DEVICE Item item() const {
    const int token = paths.numbers.start + first_token;
    const int count = min(TOKENS, paths.numbers.end - token);
    return {head, token, count * GROUP, tiles, tiles, tiles * KEYS};
  }
  // Whether the root's work item begins with tiles before the root's.
  DEVICE bool goes_on() const { return unit_start(paths.root_unit()) < tiles; }
  // Whether tokens see keys of a work item behind the root's.
  DEVICE bool has_unit(int unit) const { return unit_start(unit) < all_tiles; }
};

// ---- rows of `Handed`, as the computing warps and as the tail's have them ----

DEVICE void store_rows(Handed& to, const State& unit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r), lane = thread_from_here() % 4;
    float* sums = to.sums[row] + 2 * lane;
#pragma unroll
    for (int j = 0; j < OWN_SIZE / 8; ++j) {
      *(float2*)(sums + 8 * j) = {unit.acc[4 * j + 2 * r], unit.acc[4 * j + 2 * r + 1]};
    }
    if (lane == 0) to.states[row] = {unit.largest[r], unit.total[r]};
  }
}

DEVICE void load_rows(State& unit, const Handed& from) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    const float* sums = from.sums[row] + thread_from_here() % 4 * 2;
#pragma unroll
    for (int j = 0; j < OWN_SIZE / 8; ++j) {
      const float2 pair = *(const float2*)(sums + 8 * j);
      unit.acc[4 * j + 2 * r] = pair.x, unit.acc[4 * j + 2 * r + 1] = pair.y;
    }
    unit.largest[r] = from.states[row].x, unit.total[r] = from.states[row].y;
  }
}

DEVICE void store_columns(Handed& to, const columns::ColumnState& state, int block) {
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c;
    if (lane_id() < 4) to.states[row] = {state.largest[0][c], c == 0 ? state.total[0] : other};
#pragma unroll
    for (int i = 0; i < columns::OWN_STEPS; ++i) {
      to.sums[row][columns::value_dimension(i, 0)] = state.sums[0][i][c];
      to.sums[row][columns::value_dimension(i, 1)] = state.sums[0][i][c + 2];
    }
  }
}

DEVICE void load_columns(columns::ColumnState& state, const Handed& from, int block) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane_id() % 4 * 2 + c;
    state.largest[0][c] = from.states[row].x;
    if (bool(lane_id() & 4) == bool(c)) state.total[0] = from.states[row].y;
#pragma unroll
    for (int i = 0; i < columns::OWN_STEPS; ++i) {
      state.sums[0][i][c] = from.sums[row][columns::value_dimension(i, 0)];
      state.sums[0][i][c + 2] = from.sums[row][columns::value_dimension(i, 1)];
    }
  }
}

// A step's trees, and where tokens and keys are.
struct Sources {
  const MODEL_TYPE::Storage* q;
  const KV_TYPE::Storage* cache;
  const int *position_ids, *block_tables;
  columns::StepTrees trees;
  int table_stride, num_pages, num_tokens;
  const float *v_scale, *out_scale;

  // What sums are multiplied by, and the inverse of the unit of outputs.
  DEVICE float2 scales() const {
    return {V_SCALE ? *(const volatile float*)v_scale : 1.0f,
            STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f};
  }
};

// Attends to the keys from the root's tile on, for 8 of the part's rows.
DEVICE void attend_tail(const TailShared& shared, u32 query_operands, const Part& part,
                        const Sources& from, float scale) {
  const int thread = threadIdx.x % TAIL_THREADS, block = thread / 32, lane = lane_id();
  const Item item = part.item();
  const int* table = from.block_tables + (long long)part.request * from.table_stride;
  const int first_nth = 8 * block / GROUP;  // of the columns' tokens
  const int first_token = part.first_token + first_nth;
  const int page = part.paths.load_page(table, from.table_stride);
  const columns::ColumnTokens tokens =
      part.paths.load_tokens(from.position_ids, first_token, from.num_tokens);
  if (block == 0) columns::TreePaths::clear_row(shared.window);
  part.paths.find_rows(shared.rows, tokens, from.trees, first_token, first_nth);
  if (lane < 8) {
    const int row = 8 * block + lane, token = item.token + row / GROUP;
    const bool is_real = row < item.rows && token < from.num_tokens;
    const int last = part.paths.numbers.limit - 1;
    shared.seen[row] = is_real ? min(load_int(from.position_ids + token), last) : -1;
  }
  if (block == 1 && lane == 0) shared.scales = from.scales();  // the warps that store need not wait for them
  wait_for_dependencies();  // for the step's own keys and values, and queries
  part.paths.copy_window<TAIL_THREADS>(shared.window, thread, from.cache, part.head, part.nth, page,
                                       from.table_stride, from.num_pages);
  const u32 queries_at = query_operands + block * (STEPS * 256);
  stage_columns(queries_at, from.q, item, block);
  columns::wait_for_copies<0>();
  meet<TAIL, TAIL_THREADS>();
  columns::Queries queries;
  queries.start(queries_at);
  int unit = part.paths.root_unit(), tile = part.tiles;
  bool goes_on = part.goes_on();
  columns::ColumnState state;
  state.clear();
  if (goes_on) {
    meet<UNIT_STOPPED>();
    load_columns(state, shared.handed, block);
    __syncwarp();
  }
#pragma unroll 1
  while (true) {  // in one place: between other kernels, instructions are far away
    part.paths.add_tiles(state, shared.window, queries, shared.seen + 8 * block,
                         shared.rows + first_nth, tile, min(unit_start(unit + 1), part.all_tiles),
                         scale, !goes_on);
    if (unit > part.paths.root_unit()) meet<UNIT_MERGED>();
    store_columns(shared.handed, state, block);
    arrive<UNIT_DONE>();
    if (!part.has_unit(++unit)) return;
    state.clear();
    tile = unit_start(unit), goes_on = false;
  }
}

// What the last warps of tree.cu do: keys from the root's tile on, for 8 rows each.
#pragma once

#include "ops/paged_attention/tree_columns.cuh"
#include "ops/paged_attention/tree_shares.cuh"

constexpr int TAIL_WARPS = 8, TAIL_THREADS = 32 * TAIL_WARPS;  // a warp for 8 of 64 rows

// A work item's rows while they pass between the computing warps and the tail's: some dimensions of their sums, largest
// and total. LENGTH: floats from row to row, more than dimensions, so that rows fall on different banks.
template <int COUNT, int LENGTH>
struct RowsOf {
  static constexpr int ROW_BYTES = LENGTH * 4;
  float sums[COUNT][LENGTH];
  float2 states[COUNT];
  DEVICE float2& pair(int row, int dimension) { return *(float2*)&sums[row][dimension]; }
};
// To the tail: rows of which it goes on with the root's work item. From the tail: dimensions that the block merges.
typedef RowsOf<64 / SPLITS, SIZE + (SPLITS == 1 ? 8 : 2)> Begun;
typedef RowsOf<64, SIZE / SPLITS + 8> Handed;

// Shared memory behind what chunk_load.cuh has.
struct TailShared {
  static constexpr int AT = (Shared::CLAIM_AT + 16 + 1023) / 1024 * 1024;
  static constexpr int HANDED_AT = AT + 2 * columns::WINDOW_BYTES;
  static constexpr int SLOTS_AT = HANDED_AT + sizeof(Handed);
  static constexpr int SENDING_AT = SLOTS_AT + 2 * SENT_BYTES;
  static constexpr int BEGUN_AT = SPLITS == 1 ? HANDED_AT : SENDING_AT;  // before anything else lies there
  static constexpr int ROWS_AT = SENDING_AT + SENT_BYTES;
  static constexpr int SEEN_AT = ROWS_AT + TOKENS * columns::WINDOW_KEYS;
  static constexpr int BARRIERS_AT = SEEN_AT + 64 * sizeof(int);
  static constexpr int BYTES = BARRIERS_AT + 8 * (4 + 3 * 4);

  u32 window, slots, sending;  // the latter for what blocks send to each other
  Begun& begun;
  Handed& handed;
  u8 (*rows)[columns::WINDOW_KEYS];  // where each token has its keys in the window
  int* seen;                         // the last key of each row
  u32 has_begun, is_taken;           // barriers: of `begun`,
  u32 is_handed, is_free, sent;      // of `handed`, and of what blocks send to each other

  DEVICE explicit TailShared(u8* memory)
      : window(shared_address(memory) + AT),
        slots(shared_address(memory) + SLOTS_AT),
        sending(shared_address(memory) + SENDING_AT),
        begun(*(Begun*)(memory + BEGUN_AT)),
        handed(*(Handed*)(memory + HANDED_AT)),
        rows((u8(*)[columns::WINDOW_KEYS])(memory + ROWS_AT)),
        seen((int*)(memory + SEEN_AT)),
        has_begun(shared_address(memory) + BARRIERS_AT),
        is_taken(has_begun + 8),
        is_handed(has_begun + 16),
        is_free(has_begun + 24),
        sent(has_begun + 32) {}
  // If two blocks share tiles, both send rows here, which are counted in bytes.
  DEVICE void expect_rows() const {
    if (SPLITS > 1) barrier_expect(is_handed, 64 * (SIZE / SPLITS * 4 + 8));
  }
  DEVICE void begin() const {
    barrier_init(has_begun, 4);
    barrier_init(is_taken, TAIL_WARPS);
    barrier_init(is_free, 4 * SPLITS);
    barrier_init(is_handed, SPLITS == 1 ? TAIL_WARPS : 1);
    expect_rows();
    begin_barriers(sent);
  }
};
static_assert(TailShared::BYTES <= SHARED_BYTES, "room for all of it");
static_assert(SPLITS == 1 || sizeof(Begun) <= SENT_BYTES, "room for rows where others are sent");

// ---- meetings of the computing warps and the tail's, of all blocks that share tiles ----

enum Meeting { TAIL = 2, COMPUTING };
template <int MEETING, int COUNT>
DEVICE void meet() {
  asm volatile("barrier.sync %0, %1;" ::"n"(MEETING), "n"(COUNT) : "memory");
}
DEVICE void meet_tail() { asm volatile("barrier.sync 2, %0;" ::"n"(TAIL_THREADS) : "memory"); }

// A warp tells a barrier of every block what it has read or, if it is the only block, written.
DEVICE void tell_all(u32 barrier) {
  __syncwarp();
  if (lane_id() >= SPLITS) return;
  if (SPLITS == 1) barrier_arrive(barrier);
  else barrier_arrive_remote(remote_address(barrier, lane_id()));
}

// Waits for the other side of `Handed`.
struct Turn {
  u32 barrier, parity = 0;
  DEVICE void wait() {
    barrier_wait_cluster(barrier, parity);
    parity ^= 1;
  }
};

// What a thread block computes: some tokens of one request, for one KV head.
struct Part {
  columns::TreePaths paths;
  int head, request, first_token;
  int tiles, all_tiles;  // before the root's; that any of the tokens sees

  DEVICE Item item() const {
    const int token = paths.numbers.start + first_token;
    const int count = min(TOKENS, paths.numbers.end - token);
    return {head, token, count * GROUP, tiles, tiles, tiles * KEYS};
  }
  DEVICE int root_unit() const { return count_units(tiles + 1) - 1; }
  // Whether the root's work item begins with tiles before the root's.
  DEVICE bool goes_on() const { return unit_start(root_unit()) < tiles; }
  static DEVICE int rank() { return SPLITS > 1 ? blockIdx.x : 0; }
  DEVICE OwnTiles own_tiles() const { return {tiles, root_unit(), rank()}; }
  // Finds out which tiles its tokens see; by whole warps.
  DEVICE void see(const int* position_ids, int num_tokens) {
    const int begin = paths.numbers.start + first_token;
    const int end = min(min(begin + TOKENS, paths.numbers.end), num_tokens);
    int position = -1;
    for (int at = begin + lane_id(); at < end; at += 32) {
      position = max(position, load_int(position_ids + at));
    }
    position = min(__reduce_max_sync(~0u, position), paths.numbers.limit - 1);
    all_tiles = min(max(position / KEYS, tiles) + 1, tiles + WINDOW_TILES);
  }
  // Whether tokens see keys of a work item behind the root's.
  DEVICE bool has_unit(int unit) const { return unit_start(unit) < all_tiles; }
};

// ---- rows as the computing warps and as the tail's have them ----

// Those that this block's tail goes on with.
DEVICE void store_rows(Begun& to, int rank, const float (&acc)[SIZE / 2], const float (&largest)[2],
                       const float (&total)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r) - rank * (64 / SPLITS), lane = thread_from_here() % 4;
    if (u32(row) >= 64 / SPLITS) continue;
#pragma unroll
    for (int j = 0; j < SIZE / 8; ++j) {
      to.pair(row, 8 * j + 2 * lane) = {acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]};
    }
    if (lane == 0) to.states[row] = {largest[r], total[r]};
  }
}

DEVICE void load_rows(Merged& unit, Handed& from) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
#pragma unroll
    for (int j = 0; j < OWN / 4; ++j) {
      const float2 pair = from.pair(row, 8 * j + thread_from_here() % 4 * 2);
      unit.acc[4 * j + 2 * r] = pair.x, unit.acc[4 * j + 2 * r + 1] = pair.y;
    }
    unit.largest[r] = from.states[row].x, unit.total[r] = from.states[row].y;
  }
}

// The columns of a tail's warp: a block of 8 rows or, if two blocks share tiles, of half of the part's rows, one half of
// the tokens each.
struct Columns {
  int block;
  columns::Those tokens;

  DEVICE Columns(int warp, int rank) : block(warp) {
    if (SPLITS == 1) return;
    constexpr int EACH = (columns::BLOCK_TOKENS + 1) / 2;
    block = rank * (TAIL_WARPS / 2) + warp / 2;
    tokens = {warp % 2 * EACH, min((warp % 2 + 1) * EACH, columns::BLOCK_TOKENS)};
  }
  DEVICE bool has(int row) const { return tokens.has(row % 8 / GROUP); }
};

// Where a block takes rows of `Handed`: in its own shared memory or, of two that share tiles, in any block's.
struct Taker {
  u32 handed, is_handed;

  DEVICE Taker(const TailShared& shared, int rank) : handed(shared_address(&shared.handed)), is_handed(shared.is_handed) {
    if (SPLITS == 1) return;
    handed = remote_address(handed, rank), is_handed = remote_address(is_handed, rank);
  }
  DEVICE void store(u32 at, float a, float b) const {
    if (SPLITS > 1) store_remote_pair(handed + at, is_handed, a, b);
    else store_two(handed + at, a, b);
  }
};

// Stores sums in the block that merges them, and states in all; tells them.
DEVICE void hand_columns(const TailShared& shared, const columns::ColumnState& state, const Columns& its) {
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
#pragma unroll
  for (int rank = 0; rank < SPLITS; ++rank) {
    const Taker taker(shared, rank);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * its.block + lane_id() % 4 * 2 + c;
      if (!its.has(row)) continue;
      if (lane_id() < 4) {
        taker.store(sizeof(shared.handed.sums) + row * 8, state.largest[0][c], c == 0 ? state.total[0] : other);
      }
#pragma unroll
      for (int i = rank * STEPS / SPLITS; i < (rank + 1) * STEPS / SPLITS; ++i) {
        const int dimension = columns::value_dimension(i, 0) - rank * (SIZE / SPLITS);
        taker.store(row * Handed::ROW_BYTES + dimension * 4, state.sums[0][i][c], state.sums[0][i][c + 2]);
      }
    }
  }
  if (SPLITS == 1) tell_all(shared.is_handed);
}

DEVICE void load_columns(columns::ColumnState& state, Begun& from, int block) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block % (64 / SPLITS) + lane_id() % 4 * 2 + c;
    state.largest[0][c] = from.states[row].x;
    if (bool(lane_id() & 4) == bool(c)) state.total[0] = from.states[row].y;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float2 pair = from.pair(row, columns::value_dimension(i, 0));
      state.sums[0][i][c] = pair.x, state.sums[0][i][c + 2] = pair.y;
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
};

// Attends to the keys from the root's tile on, for a warp's columns.
DEVICE void attend_tail(const TailShared& shared, u32 query_operands, const Part& part,
                        const Sources& from, float scale) {
  const int thread = threadIdx.x % TAIL_THREADS, lane = lane_id();
  const Columns its(thread / 32, part.rank());
  const int block = its.block;
  const Item item = part.item();
  const int* table = from.block_tables + (long long)part.request * from.table_stride;
  const int first_nth = 8 * block / GROUP;  // of the columns' tokens
  const int first_token = part.first_token + first_nth;
  const int page = part.paths.load_page(table, from.table_stride);
  const columns::ColumnTokens tokens =
      part.paths.load_tokens(from.position_ids, first_token, from.num_tokens);
  if (thread < 32) columns::TreePaths::clear_row(shared.window);
  part.paths.copy_window<TAIL_THREADS>(shared.window, thread, from.cache, part.head, page,
                                       from.table_stride, from.num_pages);
  part.paths.find_rows(shared.rows, tokens, from.trees, first_token, first_nth,
                       its.tokens);
  const u32 queries_at = query_operands + block * (STEPS * 256);
  stage_columns(queries_at, from.q, item, block);
  if (lane < 8) {
    const int row = 8 * block + lane, token = item.token + row / GROUP;
    const bool is_real = row < item.rows && token < from.num_tokens;
    const int last = part.paths.numbers.limit - 1;
    shared.seen[row] = is_real ? min(load_int(from.position_ids + token), last) : -1;
  }
  columns::wait_for_copies<0>();
  meet_tail();
  columns::Queries queries;
  queries.start(queries_at);
  const auto add = [&](columns::ColumnState& state, int tile, int end, bool is_first) {
    part.paths.add_tiles(state, shared.window, queries, shared.seen + 8 * block,
                         shared.rows + first_nth, tile, end, scale, is_first, its.tokens);
  };
  Turn free{shared.is_free};
  int unit = part.root_unit();
  columns::ColumnState state;
  state.clear();
  if (part.goes_on()) {
    barrier_wait(shared.has_begun, 0);
    load_columns(state, shared.begun, block);
    tell(shared.is_taken);
  }
  add(state, part.tiles, min(unit_start(unit + 1), part.all_tiles), !part.goes_on());
  hand_columns(shared, state, its);
#pragma unroll 1
  while (part.has_unit(++unit)) {
    state.clear();
    add(state, unit_start(unit), min(unit_start(unit + 1), part.all_tiles), true);
    free.wait();
    hand_columns(shared, state, its);
  }
}

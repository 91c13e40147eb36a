// What a group of four warps (`team`) needs to process attention work items (`unit`) in layers.cu: where keys
// and values are stored, what is the same in all layers, and where a work item's state is written. Each warp
// copies 16 keys of a tile and their values.
//
// Its macros are used until the end of attend.cuh.
#pragma once

#include "fused/decoder_layers/landing.cuh"

#define HEADS NUM_KV_HEADS
#define GROUP (NUM_HEADS / NUM_KV_HEADS)
#define SIZE HEAD_SIZE
#define COLUMNS 8
#define QUERY_BYTES 0
#define UNIT 1
namespace attention {
#include "ops/paged_attention/batch/state.cuh"

static_assert(TOKENS * GROUP <= COLUMNS, "the rows of a request are the columns of a product");
constexpr int SLICES = NUM_BLOCKS / HEADS;  // blocks that share the merge of a head
constexpr int PAIRS = TOKENS * GROUP * SIZE / 2;  // pairs of dimensions of a head
constexpr int SLICE_PAIRS = (PAIRS + SLICES - 1) / SLICES;
constexpr int TEAM = 4, TEAMS = WARPS / TEAM;  // warps
constexpr int MERGER = TEAM;                   // the warp that merges: in short contexts only the first team has attention work
constexpr int OWN_STEPS = STEPS / TEAM;        // a warp's share, in blocks of 16 dimensions
constexpr int SLOT_BYTES = 2 * TILE_BYTES;     // keys and values
typedef StateOf<OWN_STEPS> OwnState;
static_assert(BLOCKS == TEAM && STEPS % TEAM == 0, "a warp has 16 keys, and a part of the dimensions");
constexpr int TILES_BYTES = TEAMS * SLOTS * SLOT_BYTES;
static_assert(TILES_BYTES + (IS_FETCHED ? TEAMS * TEAM_LANDING : 0) <= ROOM, "tiles of each team, and what is fetched");
static_assert(SLOTS == 1 || SLOTS == 2, "a tile, and the next");
// What contexts that the binary is for have at most: tiles of a work item, work items of all heads.
constexpr int MOST_TILES = unit_start(MAX_UNITS) - unit_start(MAX_UNITS - 1), MOST_TASKS = HEADS * MAX_UNITS;
// No team has two work items. Where work items may have four tiles the loop stays: without it, 8-bit weights spill.
constexpr bool IS_ONE_EACH = MOST_TILES <= 2 && MOST_TASKS <= TEAMS * NUM_BLOCKS;
// With one slot for each team, a work item's second tile has that of the block's second team: work items are given out
// from the last one on, which is the longest, and second teams have theirs from the last block on. So no block has one
// of two tiles and another one.
constexpr int LONG_TASKS = HEADS * (MAX_UNITS - 16);  // of two tiles
constexpr bool LENDS = SLOTS == 1 && LINE <= 128 && TOKENS == 1 && MOST_TILES == 2 && IS_ONE_EACH &&
                       MOST_TASKS + LONG_TASKS <= TEAMS * NUM_BLOCKS;
// A work item's second tile has a slot of its own, or waits in registers for the first one's slot if there
// are enough registers (otherwise it is prefetched to L2). Then its page numbers are read once per step, not
// once per layer.
constexpr bool KEEPS = SLOTS == 1 && LINE <= 128 && TOKENS == 1 && !MXFP4 && HELD == 0 && MOST_TILES > 1 && !LENDS;
constexpr bool READS_AHEAD = MOST_TILES > 1 && (SLOTS == 2 || KEEPS || LENDS);
// A work item's first two tiles are processed side by side where both have a slot and there are enough registers. With
// 4-bit weights the code would be too long.
constexpr bool TAKES_TWO = MOST_TILES > 1 && !MXFP4 &&
                           (LENDS || (SLOTS == 2 && SIZE == 64 && (TOKENS == 1 || HELD < 2)));

DEVICE void store_shared16(u32 to, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
DEVICE int warp_of_team() { return threadIdx.x / 32 % TEAM; }
DEVICE void team_meet() {
  asm volatile("bar.sync %0, %1;" ::"r"(int(2 + threadIdx.x / (32 * TEAM))), "n"(32 * TEAM) : "memory");
}
// The place of a team's first work item, counted over all heads, and the work item of a place.
DEVICE int first_place(int team) {
  return team * NUM_BLOCKS + (LENDS && team > 0 ? NUM_BLOCKS - 1 - int(blockIdx.x) : int(blockIdx.x));
}
DEVICE int first_place() { return first_place(threadIdx.x / (32 * TEAM)); }
DEVICE int task_at(int place, int tasks) { return LENDS && place < tasks ? tasks - 1 - place : place; }

// Where the warp's keys of a tile are stored.
struct Pages {
  static constexpr int KEYS_OF_WARP = KEYS / TEAM;
  static constexpr int COUNT = (KEYS_OF_WARP + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
  int numbers[COUNT];

  DEVICE void load(const int* table, int tile, int limit) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int key = tile * KEYS + warp_of_team() * KEYS_OF_WARP + i * TOKENS_PER_BLOCK;
      numbers[i] = key < limit ? load_int(table + key / TOKENS_PER_BLOCK) : 0;
    }
  }
  // A key of the warp, of KV head `head`: `nth` of KEYS_OF_WARP.
  DEVICE const Cached* key(const Cached* cache, int head, int tile, int nth, int kv) const {
    const int at = (warp_of_team() * KEYS_OF_WARP + tile * KEYS + nth) % TOKENS_PER_BLOCK;
    const long long page = numbers[COUNT == 1 ? 0 : nth / TOKENS_PER_BLOCK];
    return cache + page * (2 * PAGE) + kv * PAGE + (head * TOKENS_PER_BLOCK + at) * SIZE;
  }
};

// The step's tokens, and the work items of a head.
struct Extent {
  int start, num_tokens, limit, tiles, units;
  DEVICE Extent(const int* cu_q, const int* kv_lens) {
    start = load_int(cu_q);
    num_tokens = load_int(cu_q + 1) - start;
    limit = load_int(kv_lens);
    if (IS_LONG) limit = min(limit, unit_start(MAX_UNITS) * KEYS);
    tiles = (limit + KEYS - 1) / KEYS;
    if (num_tokens <= 0 || num_tokens > TOKENS || limit < num_tokens) tiles = num_tokens = 0;
    units = tiles > 0 ? min(count_units(tiles), MAX_UNITS) : 0;
  }
};

// What is the same in all layers.
struct Step {
  const int* block_tables;
  float softmax_scale;
  int table_stride;
  int num_rows, num_tokens, limit, tiles, units;
  int seen[2], all_see;  // the last key that the lane's columns see, and that all see
  Pages pages, ahead;    // of the team's first tile, and of the next one (READS_AHEAD)

  DEVICE Step(const int* cu_q, const int* kv_lens, const int* tables, const int* positions,
              float scale, int stride)
      : block_tables(tables), softmax_scale(scale), table_stride(stride) {
    const Extent extent(cu_q, kv_lens);
    const int start = extent.start;
    num_tokens = extent.num_tokens, limit = extent.limit, tiles = extent.tiles, units = extent.units;
    num_rows = num_tokens * GROUP;
    all_see = limit - 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane_id() % 4 * 2 + c;
      seen[c] = limit - 1;
      if (column < num_rows) seen[c] = min(load_int(positions + start + column / GROUP), limit - 1);
      all_see = min(all_see, seen[c]);
    }
    all_see = __reduce_min_sync(~0u, all_see);
    const int first = unit_start(task_at(first_place(), units * HEADS) / HEADS);
    pages.load(block_tables, first, limit);
    if (READS_AHEAD) ahead.load(block_tables, first + 1, limit);
  }
};

constexpr int STATE_BYTES = COLUMNS * 8, SUMS_BYTES = COLUMNS * SIZE * 4;  // per work item
DEVICE int state_at(int head, int unit) {
  return STATES_AT + (head * MAX_UNITS + unit) * STATE_BYTES;
}
DEVICE int sums_at(int head, int unit) { return SUMS_AT + (head * MAX_UNITS + unit) * SUMS_BYTES; }

// A warp's part of a work item's state in one of the two exchange buffers, read by the block that merges it:
// the lane's first pair of each.
struct StatePlace {
  static constexpr int ROW = SIZE * 4, STEP = 16 * 4;  // bytes of sums
  u8 *state, *sums;
  DEVICE StatePlace(u8* half, int head, int unit) : StatePlace(half, head, unit, warp_of_team()) {}
  DEVICE StatePlace(u8* half, int head, int unit, int part) {
    const int lane = lane_id(), row = lane % 4 * 2;
    state = half + state_at(head, unit) + row * 8;
    sums = half + sums_at(head, unit) + row * ROW + part * OWN_STEPS * STEP + lane / 4 * 8;
  }
  static DEVICE bool has_state() { return warp_of_team() == 0 && lane_id() < 4; }

  DEVICE void give(int num_rows, const OwnState& x) const { give_part(num_rows, x, has_state()); }
  DEVICE void give_whole(int num_rows, const State& x) const { give_part(num_rows, x, lane_id() < 4); }
  template <int N>
  DEVICE void give_part(int num_rows, const StateOf<N>& x, bool has_state) const {
    const int lane = lane_id();
    const float other = __shfl_xor_sync(~0u, x.total[0], 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (lane % 4 * 2 + c >= num_rows) continue;
      const float total = (lane & 4) / 4 == c ? x.total[0] : other;
      if (has_state) put_pair(state + c * 8, x.largest[0][c], total);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        put_pair(sums + c * ROW + i * STEP, x.sums[0][i][c], x.sums[0][i][c + 2]);
      }
    }
  }
  DEVICE void clear() const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (has_state()) put((uint2*)(state + c * 8), {0, 0});
#pragma unroll
      for (int i = 0; i < OWN_STEPS; ++i) put((uint2*)(sums + c * ROW + i * STEP), {0, 0});
    }
  }
};
}  // namespace attention

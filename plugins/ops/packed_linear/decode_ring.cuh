// The work of one block of the kernel for few tokens, and the ring of slots that one warp fills for it with
// weights and, unless the block normalizes them itself (decode_norm.cuh), with tokens.
#pragma once

#ifndef NORM
#define NORM 0
#define HIDDEN 0
#endif
#ifndef AHEAD
#define AHEAD 0
#endif

#include "backends/cuda/sm90/barriers.cuh"
#include "backends/cuda/sm90/cluster.cuh"
#include "ops/packed_linear/epilogue.cuh"
#include "ops/packed_linear/leaves.cuh"
#include "schemes/mxfp4/mxfp4.cuh"

// A packed block: 64 rows x 128 bytes, or 64 rows x 256 4-bit columns. It is multiplied by
// BOXES chunks of 128 bytes of the tokens.
constexpr int BLOCK_BYTES = MXFP4 ? 8 * MXFP4_OCTET_BYTES : 8192, BOXES = MXFP4 ? 2 : 1;
constexpr int X_BYTES = TOKENS * 128;
constexpr int WEIGHT_BYTES = (ROW_TILES * CHUNKS * BLOCK_BYTES + 1023) / 1024 * 1024;
constexpr int STAGE_BYTES = WEIGHT_BYTES + (NORM ? 0 : CHUNKS * BOXES * X_BYTES);
constexpr int ELEMENTS = 128 / INPUT_TYPE::bytes;  // of a token chunk
constexpr int INTERVAL = 4 / BOXES;                // chunks of an FP8 interval
constexpr bool IS_FP8 = INPUT_TYPE::bytes == 1;
constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int OCTETS = TOKENS / 8;
constexpr int CLUSTER = SPLIT == 0 ? 1 : SPLIT;  // blocks that share K
constexpr int OWNED = 4 / CLUSTER;  // groups of 16 rows of a tile that one block stores
constexpr int PART_BYTES = 512;   // 16 rows x 8 tokens of float32
static_assert(CLUSTER == 1 || IS_FP8, "only sums in intervals can be divided over blocks");
static_assert(LEAVES == 1 || ROW_TILES == 1, "row tiles of a slot have the same tokens");
static_assert(SPLIT != 0 || ROW_TILES == 1, "shared tiles are handed on one by one");
static_assert(SHARERS == 1 || (SPLIT == 1 && FILL == 0 && !NORM), "blocks that share weights share nothing else");
static_assert(AHEAD == 0 || (SPLIT == 1 && FILL > 0 && SHARERS == 1 && !NORM && !MXFP4), "a row tile to a block");
static_assert(INTERVAL % CHUNKS == 0, "an interval ends with a slot");
static_assert(!MXFP4 || (IS_FP8 && !NORM), "4-bit weights meet FP8 tokens, which come normalized");

// The first token of a block.
DEVICE int first_token() {
  return (blockIdx.y * SHARERS + blockIdx.x % SHARERS) * TOKENS;
}

// The work of one block, and the slots of the ring that it uses, in order.
#if SPLIT != 0

struct Walk {
  int tile, last_tile;  // row tiles, exclusive
  int first, last;      // chunks, exclusive
  int active;           // row tiles of this group
  int chunk;
  int slot;
  u32 phase;

  DEVICE Walk(int row_tiles, int chunks) {
    const int rank = blockIdx.x % SPLIT, blocks = gridDim.x / (SPLIT * SHARERS);
    const long long block = blockIdx.x / (SPLIT * SHARERS);
    tile = int(block * row_tiles / blocks);
    last_tile = int((block + 1) * row_tiles / blocks);
    const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
    first = SPLIT == 1 ? 0 : rank * intervals / SPLIT * INTERVAL;
    last = SPLIT == 1 ? chunks : min((rank + 1) * intervals / SPLIT * INTERVAL, chunks);
    active = min(ROW_TILES, last_tile - tile);
    chunk = first;
    slot = 0;
    phase = 0;
  }
  DEVICE bool done() const { return tile >= last_tile || first >= last; }
  DEVICE void next_tiles() {
    tile += active;
    active = min(ROW_TILES, last_tile - tile);
    chunk = first;
  }
#else

// Every block has the same number of intervals, so its first and last tile may be shared with
// its neighbours. It starts with the leading part of its last tile and leaves that sum to the next
// block, which computes the rest of the tile last and so need not wait for it.
struct Walk {
  static constexpr int active = 1;
  int tile, first, last;  // of the current piece: row tile, chunks
  int chunk;
  int slot;
  u32 phase;
  int chunks, begin_tile, begin_chunk, end_tile, end_chunk;
  int part;  // 0: the last tile's beginning, 1: whole tiles, 2: the first tile's end, 3: nothing

  DEVICE Walk(int row_tiles, int chunks_) {
    chunks = chunks_;
    const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
    const long long units = (long long)row_tiles * intervals, block = blockIdx.x;
    const int begin = int(block * units / gridDim.x), end = int((block + 1) * units / gridDim.x);
    begin_tile = begin / intervals;
    begin_chunk = begin % intervals * INTERVAL;
    end_tile = end / intervals;
    end_chunk = end % intervals * INTERVAL;
    slot = 0;
    phase = 0;
    part = begin_tile == end_tile ? 2 : end_chunk > 0 ? 0 : 1;
    tile = part == 0 ? end_tile : begin_tile + (begin_chunk > 0);
    enter();
  }
  DEVICE void enter() {
    first = 0;
    last = part == 0 ? end_chunk : chunks;
    if (part == 1 && tile >= end_tile) part = 2;
    if (part == 2) {
      tile = begin_tile;
      first = begin_chunk;
      if (begin_tile == end_tile) last = end_chunk;
      if (first >= last || (first == 0 && begin_tile != end_tile)) part = 3;
    }
    chunk = first;
  }
  DEVICE bool done() const { return part == 3; }
  DEVICE void next_tiles() {
    if (part == 1) ++tile;
    if (part == 0) part = 1, tile = begin_tile + (begin_chunk > 0);
    else if (part == 2) part = 3;
    if (part != 3) enter();
  }
#endif
  DEVICE void next_slot() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  DEVICE void next() {
    next_slot();
    chunk += CHUNKS;
    if (chunk >= last) next_tiles();
  }
};

struct Shared {
  u32 table;  // with MXFP4
  u32 ring;
  u32 tokens, squares;  // with NORM: all chunks of the tokens; sums of squares for their norms
  u32 parts, full, empty, parts_full;
  u32 first;  // with FILL: the weights of a slot's first pass have arrived
  u32 unread, unread_full;  // with AHEAD: a place that nobody reads
  DEVICE explicit Shared(u32 base) {
    table = (base + 255) & ~255u;
    ring = (base + (MXFP4 ? 255 + MXFP4_TABLE_BYTES : 0) + 1023) & ~1023u;
    tokens = ring + STAGES * STAGE_BYTES;
#if NORM
    squares = tokens + HIDDEN / ELEMENTS * X_BYTES;
    parts = squares + 2 * 128;
#else
    parts = squares = tokens;
#endif
    full = parts + (CLUSTER > 1 ? MAX_INTERVALS * ROW_TILES * OWNED * OCTETS * PART_BYTES : 0);
    empty = full + 8 * STAGES;
    parts_full = empty + 8 * STAGES;
    first = parts_full + 8;
    unread_full = first + 8 * STAGES;
    unread = (unread_full + 8 + 127) & ~127u;
  }
};

// ---- the copying warp ----

DEVICE void copy_weights(const Shared& shared, const Walk& walk, const u8* weight, int chunks,
                         u32 x_bytes, u64 policy, bool is_first = false) {
  const u32 full = (is_first ? shared.first : shared.full) + 8 * walk.slot;
  barrier_expect(full, walk.active * (CHUNKS * BLOCK_BYTES) + CHUNKS * BOXES * x_bytes);
  // Of what blocks share each copies a part to all of them.
  constexpr int PART = CHUNKS * BLOCK_BYTES / SHARERS;
  const int part = blockIdx.x % SHARERS * PART;
  const u8* from = weight + ((long long)walk.tile * chunks + walk.chunk) * BLOCK_BYTES + part;
  const u32 to = shared.ring + walk.slot * STAGE_BYTES + part;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    if (r < walk.active) {
      const u8* its = from + (long long)r * chunks * BLOCK_BYTES;
      if (SHARERS == 1) {
        copy_block(to + r * CHUNKS * BLOCK_BYTES, its, PART, full, policy);
      } else {
        copy_block_to((1 << SHARERS) - 1, to + r * CHUNKS * BLOCK_BYTES, its, PART, full, policy);
      }
    }
  }
}

#if NORM

DEVICE void fill_ring(const Shared& shared, const u8* weight, int row_tiles, int chunks) {
  const u64 once = evict_first_policy();
  Walk walk(row_tiles, chunks);
  for (int i = 0; i < STAGES && !walk.done(); ++i, walk.next()) {
    copy_weights(shared, walk, weight, chunks, 0, once);
  }
  if (WRITES_CACHE) wait_for_dependencies();
  launch_dependents();
  for (; !walk.done(); walk.next()) {
    barrier_wait(shared.empty + 8 * walk.slot, walk.phase ^ 1);
    copy_weights(shared, walk, weight, chunks, 0, once);
  }
}

#else

DEVICE void copy_tokens(const Shared& shared, const Walk& walk, const Leaf& leaf,
                        const TensorMap* x, u64 policy) {
  const u32 to = shared.ring + walk.slot * STAGE_BYTES + WEIGHT_BYTES;
  const int chunk = leaf.first_chunk(walk.tile) + walk.chunk;
#pragma unroll
  for (int c = 0; c < CHUNKS * BOXES; ++c) {
    copy_box(to + c * X_BYTES, x, (chunk * BOXES + c) * ELEMENTS, first_token(),
             shared.full + 8 * walk.slot, policy);
  }
}

// With AHEAD: where the kernel before still has most multiprocessors, the first AHEAD blocks wait with full rings, and
// the memory has nothing to do. Until the first tokens come they load parts of the last row tiles, whose blocks begin
// later, so that L2 has them; nobody reads the copies. (`cp.async.bulk.prefetch.L2` of as many bytes does less.) The parts
// lie among what comes from memory, which is read meanwhile.
constexpr int PART_CHUNKS = 2, PART_EVERY = 6, MOST_PARTS = 60;  // pending bytes are less than 1 MiB
struct LoadAhead {
  static DEVICE void copy(const Shared& shared, const u8* from, u32 bytes) {  // L2 keeps it like any other line
    barrier_expect_more(shared.unread_full, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared.unread),
        "l"(from), "r"(bytes), "r"(shared.unread_full)
        : "memory");
  }
  static DEVICE void run(const Shared& shared, const u8* weight, int row_tiles, int chunks) {
    constexpr int BYTES = PART_CHUNKS * BLOCK_BYTES;
    if (int(blockIdx.x) >= AHEAD) return;
    barrier_init(shared.unread_full, 1);
    barrier_init_fence();
    int parts = 0;
    for (int chunk = PART_EVERY / 2; chunk + PART_CHUNKS <= chunks; chunk += PART_EVERY) {
      for (int tile = blockIdx.x + AHEAD; tile < row_tiles && parts < MOST_PARTS; tile += AHEAD, ++parts) {
        if (barrier_is_over(shared.full, 0)) break;
        copy(shared, weight + ((long long)tile * chunks + chunk) * BLOCK_BYTES, BYTES);
      }
    }
    barrier_arrive(shared.unread_full);
  }
  // Copies must have come before the block ends.
  static DEVICE void finish(const Shared& shared) {
    if (int(blockIdx.x) < AHEAD) barrier_wait(shared.unread_full, 0);
  }
};

// With FILL, the first pass over the ring requests no more than that many slots at once, so that what the
// preceding kernel still has to read does not queue behind a whole ring of weights. The tokens of that pass are
// loaded separately (`first_tokens`), because the copying warp may still be waiting for weights then.
DEVICE void fill_ring(const Shared& shared, const TensorMap* x, const u8* weight, int row_tiles,
                      int chunks, int tokens) {
  const u32 x_bytes = min(tokens, TOKENS) * 128;  // of a box: rows without a token are not loaded
  const u64 once = evict_first_policy(), often = evict_last_policy();
  prefetch_map(x);
  const Leaf leaf(row_tiles, chunks);
  Walk walk(row_tiles, chunks), behind = walk;
  if (FILL > 0 && !WRITES_CACHE) launch_dependents();
  int ahead = 0;
  for (; ahead < STAGES && !walk.done(); ++ahead, walk.next()) {
    if (FILL > 0 && ahead >= FILL) barrier_wait(shared.first + 8 * (ahead - FILL), 0);
    copy_weights(shared, walk, weight, chunks, FILL > 0 ? 0 : x_bytes, once, FILL > 0);
  }
  if (FILL == 0 && !WRITES_CACHE) launch_dependents();
  if (AHEAD > 0) LoadAhead::run(shared, weight, row_tiles, chunks);
  wait_for_dependencies();
  if (WRITES_CACHE) launch_dependents();
  for (; FILL == 0 && ahead > 0; --ahead, behind.next()) copy_tokens(shared, behind, leaf, x, often);
  for (; !walk.done(); walk.next()) {
    barrier_wait(shared.empty + 8 * walk.slot, walk.phase ^ 1);
    copy_weights(shared, walk, weight, chunks, x_bytes, once);
    copy_tokens(shared, walk, leaf, x, often);
  }
  if (AHEAD > 0) LoadAhead::finish(shared);
}

// The helping warp with FILL: loads the tokens of the first pass as soon as they are available.
DEVICE void first_tokens(const Shared& shared, const TensorMap* x, int row_tiles, int chunks,
                         int tokens) {
  const u32 x_bytes = min(tokens, TOKENS) * 128;
  const u64 often = evict_last_policy();
  const Leaf leaf(row_tiles, chunks);
  Walk walk(row_tiles, chunks);
  wait_for_dependencies();
  for (int i = 0; i < STAGES && !walk.done(); ++i, walk.next()) {
    barrier_expect(shared.full + 8 * walk.slot, CHUNKS * BOXES * x_bytes);
    copy_tokens(shared, walk, leaf, x, often);
  }
}

#endif

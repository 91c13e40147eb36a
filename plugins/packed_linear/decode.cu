// Packed matrix product for few tokens: out[n, r] = sum_k x[n, k] * weight[r, k], as fast as the
// weights can be read.
//
// A thread block has one warp that copies and four that multiply. The copying thread keeps a ring
// of STAGES slots full: CHUNKS chunks of K (128 bytes each) of ROW_TILES tiles of 64 weight rows,
// and of TOKENS tokens. Weights depend on no other kernel, so the ring is filled with them before
// the kernel waits for its predecessor; what remains after the wait are the token chunks. Blocks
// are persistent: each has a run of neighbouring row tiles, and the ring streams on into the next
// tiles while the last ones are stored.
//
// Order of summation (the same in every packed product): FP8 in intervals of 512 of K, each a
// chain of wgmma from zero, added to the sum in float32 in ascending order; 16-bit types in one
// chain over K. With SPLIT > 1 a cluster shares one group of row tiles, each block a run of
// intervals. Blocks send every interval's part to the block that owns its rows, and that block adds
// the parts in the same order. With SPLIT == 0 blocks have equal shares of all intervals, and a tile
// that two blocks share is summed by one after the other. K must have a multiple of CHUNKS chunks.
//
// Macros: INPUT_TYPE (E4M3 | BF16 | FP16), TOKENS (8 ... 64), ROW_TILES, CHUNKS, STAGES, SPLIT
// (0 | 1 | 2 | 4), MAX_INTERVALS (room for parts if SPLIT > 1), L2_STAGES (slots brought as far as L2
// before the wait), and those of epilogue.cuh. Grid: x blocks (times SPLIT), y token tiles.

#include "packed_linear/epilogue.cuh"

constexpr int BLOCK_BYTES = 8192;  // a packed block: 64 rows x 128 bytes
constexpr int X_BYTES = TOKENS * 128;
constexpr int WEIGHT_BYTES = ROW_TILES * CHUNKS * BLOCK_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + CHUNKS * X_BYTES;
constexpr int ELEMENTS = 128 / INPUT_TYPE::bytes;  // of a chunk
constexpr int INTERVAL = 4;                        // chunks of an FP8 interval
constexpr bool IS_FP8 = INPUT_TYPE::bytes == 1;
constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int OCTETS = TOKENS / 8;
constexpr int CLUSTER = SPLIT == 0 ? 1 : SPLIT;
constexpr int OWNED = 4 / CLUSTER;  // groups of 16 rows of a tile that one block stores
constexpr int PART_BYTES = 512;   // 16 rows x 8 tokens of float32
static_assert(CLUSTER == 1 || IS_FP8, "only sums in intervals can be divided over blocks");
static_assert(SPLIT != 0 || ROW_TILES == 1, "shared tiles are handed on one by one");
static_assert(INTERVAL % CHUNKS == 0, "an interval ends with a slot");

// What one block works on, and the slots of the ring it goes through, in order.
#if SPLIT != 0

struct Walk {
  int tile, last_tile;  // row tiles, exclusive
  int first, last;      // chunks, exclusive
  int active;           // row tiles of this group
  int chunk;
  int slot;
  u32 phase;

  DEVICE Walk(int row_tiles, int chunks) {
    const int rank = blockIdx.x % SPLIT, blocks = gridDim.x / SPLIT;
    const long long block = blockIdx.x / SPLIT;
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

// Every block has the same number of intervals, so that its first and last tile may be shared with
// its neighbours. It begins with the leading part of its last tile and leaves the sum to the next
// block, which ends with the rest of that tile and so need not wait for it.
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
  u32 ring, parts, full, empty, parts_full;
  DEVICE explicit Shared(u32 base) {
    ring = (base + 1023) & ~1023u;
    parts = ring + STAGES * STAGE_BYTES;
    full = parts + (CLUSTER > 1 ? MAX_INTERVALS * ROW_TILES * OWNED * OCTETS * PART_BYTES : 0);
    empty = full + 8 * STAGES;
    parts_full = empty + 8 * STAGES;
  }
};

// ---- the copying warp ----

DEVICE void copy_weights(const Shared& shared, const Walk& walk, const u8* weight, int chunks,
                         u32 x_bytes, u64 policy) {
  const u32 full = shared.full + 8 * walk.slot;
  barrier_expect(full, walk.active * (CHUNKS * BLOCK_BYTES) + CHUNKS * x_bytes);
  const u8* from = weight + ((long long)walk.tile * chunks + walk.chunk) * BLOCK_BYTES;
  const u32 to = shared.ring + walk.slot * STAGE_BYTES;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    if (r < walk.active) {
      copy_block(to + r * CHUNKS * BLOCK_BYTES, from + (long long)r * chunks * BLOCK_BYTES,
                 CHUNKS * BLOCK_BYTES, full, policy);
    }
  }
}

DEVICE void copy_tokens(const Shared& shared, const Walk& walk, const TensorMap* x, u64 policy) {
  const u32 to = shared.ring + walk.slot * STAGE_BYTES + WEIGHT_BYTES;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    copy_box(to + c * X_BYTES, x, (walk.chunk + c) * ELEMENTS, blockIdx.y * TOKENS,
             shared.full + 8 * walk.slot, policy);
  }
}

DEVICE void fill_ring(const Shared& shared, const TensorMap* x, const u8* weight, int row_tiles,
                      int chunks, int tokens) {
  const u32 x_bytes = min(tokens, TOKENS) * 128;  // of a box: rows that no token needs stay behind
  const u64 once = evict_first_policy(), often = evict_last_policy();
  prefetch_map(x);
  Walk walk(row_tiles, chunks), behind = walk;
  int ahead = 0;
  for (; ahead < STAGES && !walk.done(); ++ahead, walk.next()) {
    copy_weights(shared, walk, weight, chunks, x_bytes, once);
  }
  launch_dependents();
  if (L2_STAGES > 0) {
    Walk beyond = walk;
    for (int i = 0; i < L2_STAGES && !beyond.done(); ++i, beyond.next()) {
      for (int r = 0; r < beyond.active; ++r) {
        const long long tile = beyond.tile + r;
        prefetch_block(weight + (tile * chunks + beyond.chunk) * BLOCK_BYTES,
                       CHUNKS * BLOCK_BYTES, once);
      }
    }
  }
  wait_for_dependencies();
  for (; ahead > 0; --ahead, behind.next()) copy_tokens(shared, behind, x, often);
  for (; !walk.done(); walk.next()) {
    barrier_wait(shared.empty + 8 * walk.slot, walk.phase ^ 1);
    copy_weights(shared, walk, weight, chunks, x_bytes, once);
    copy_tokens(shared, walk, x, often);
  }
}

// ---- the multiplying warps ----

// Rows of one group of 16 and eight tokens: what the epilogue needs besides the sums.
struct Slice {
  int group, token;
  RowConstants rows;
  TokenConstants tokens[2];

  DEVICE void load_rows(const Epilogue& e, int tile, int quarter, int octet) {
    group = 4 * tile + quarter;
    token = blockIdx.y * TOKENS + 8 * octet + 2 * (threadIdx.x & 3);
    rows = ::load_rows(e, group);
  }
  DEVICE void load_tokens(const Epilogue& e) {
    tokens[0] = load_token(e, group, token);
    tokens[1] = load_token(e, group, token + 1);
  }
  DEVICE void complete_tokens(const Epilogue& e) {
    complete_token(e, group, tokens[0]);
    complete_token(e, group, tokens[1]);
  }
  DEVICE void store(const Epilogue& e, const float* sum) const {
    store_pair(e, rows, tokens[0], group, token, sum[0], sum[2]);
    store_pair(e, rows, tokens[1], group, token + 1, sum[1], sum[3]);
  }
};

// Starts one slot's products into `part`, after those started before.
template <int ACTIVE>
DEVICE void start_slot(const Shared& shared, const Walk& walk, float (&part)[ACTIVE][TOKENS / 2],
                       bool is_first) {
  barrier_wait(shared.full + 8 * walk.slot, walk.phase);
  // From lane 0, so that the compiler knows descriptors to be uniform in the warp.
  const u32 stage = __shfl_sync(~0u, shared.ring + walk.slot * STAGE_BYTES, 0);
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) keep_order(part[r]);
  product_fence();
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const u64 b = operand(stage + WEIGHT_BYTES + c * X_BYTES);
    const u64 a = operand(stage + c * BLOCK_BYTES);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) {
        Product<INPUT_TYPE, TOKENS>::add(part[r], a + r * (CHUNKS * BLOCK_BYTES / 16) + 2 * k,
                                         b + 2 * k, !(is_first && c == 0 && k == 0));
      }
    }
  }
  product_commit();
}

DEVICE void free_slot(const Shared& shared, int slot) {
  if (slot >= 0 && threadIdx.x % 32 == 0) barrier_arrive(shared.empty + 8 * slot);
}

template <int ACTIVE>
DEVICE void finish_products(float (&part)[ACTIVE][TOKENS / 2]) {
  product_wait<0>();
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) keep_order(part[r]);
}

// One interval into `part`. While its first slot is multiplied, `use` takes the interval before,
// which is in `before` (first chunk `chunk_before`, negative if there is none: then `meanwhile`).
template <int ACTIVE, class Use, class Meanwhile>
DEVICE void multiply_interval(const Shared& shared, Walk& walk, float (&part)[ACTIVE][TOKENS / 2],
                              float (&before)[ACTIVE][TOKENS / 2], int& chunk_before, int& busy,
                              const Use& use, const Meanwhile& meanwhile) {
  const int begin = walk.chunk, end = min(begin + INTERVAL, walk.last);
#pragma unroll
  for (int i = 0; i < INTERVAL / CHUNKS; ++i) {
    if (i > 0 && walk.chunk >= end) break;
    start_slot<ACTIVE>(shared, walk, part, i == 0);
    if (i == 0 && chunk_before < 0) meanwhile();
    product_wait<1>();
    free_slot(shared, busy);
    busy = walk.slot;
    if (i == 0 && chunk_before >= 0) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) keep_order(before[r]);
      use(before, chunk_before);
    }
    walk.chunk += CHUNKS;
    walk.next_slot();
  }
  chunk_before = begin;
}

// All of the block's intervals of ACTIVE row tiles, in order; use(part, first chunk) takes each.
template <int ACTIVE, class Use, class Meanwhile>
DEVICE void multiply_intervals(const Shared& shared, Walk& walk, const Use& use,
                               const Meanwhile& meanwhile) {
  float even[ACTIVE][TOKENS / 2], odd[ACTIVE][TOKENS / 2];
  int before = -1, busy = -1;
  while (true) {
    multiply_interval<ACTIVE>(shared, walk, even, odd, before, busy, use,
                              meanwhile);
    if (walk.chunk >= walk.last) {
      finish_products(even);
      use(even, before);
      break;
    }
    multiply_interval<ACTIVE>(shared, walk, odd, even, before, busy, use,
                              meanwhile);
    if (walk.chunk >= walk.last) {
      finish_products(odd);
      use(odd, before);
      break;
    }
  }
  free_slot(shared, busy);
}

// The sums of ACTIVE row tiles over the block's chunks.
template <int ACTIVE, class Meanwhile>
DEVICE void multiply(const Shared& shared, Walk& walk, float (&sum)[ACTIVE][TOKENS / 2],
                     const Meanwhile& meanwhile) {
  if constexpr (!IS_FP8) {
    int busy = -1;
    for (; walk.chunk < walk.last; walk.chunk += CHUNKS, walk.next_slot()) {
      start_slot<ACTIVE>(shared, walk, sum, walk.chunk == 0);
      if (busy < 0) meanwhile();
      product_wait<1>();
      free_slot(shared, busy);
      busy = walk.slot;
    }
    finish_products(sum);
    free_slot(shared, busy);
  } else {
    const auto add = [&](float (&part)[ACTIVE][TOKENS / 2], int chunk) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
          sum[r][i] = chunk == 0 ? part[r][i] : __fadd_rn(sum[r][i], part[r][i]);
        }
      }
    };
    multiply_intervals<ACTIVE>(shared, walk, add, meanwhile);
  }
}

// ---- sums handed from a block to the next ----

struct Handover {
  float4* sums;  // [blocks, TOKENS / 8, 128 threads]
  int* ready;    // [blocks]: 1 while a sum waits for the next block
};

DEVICE void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

DEVICE void hand_over(const Handover& h, const float (&sum)[TOKENS / 2]) {
  float4* to = h.sums + blockIdx.x * OCTETS * CONSUMERS + threadIdx.x;
#pragma unroll
  for (int j = 0; j < OCTETS; ++j) {
    to[j * CONSUMERS] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
  }
  __threadfence();
  meet();
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(h.ready + blockIdx.x) : "memory");
  }
}

DEVICE void take_over(const Handover& h, float (&sum)[TOKENS / 2]) {
  int* ready = h.ready + blockIdx.x - 1;
  if (threadIdx.x == 0) {
    int is_ready;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_ready) : "l"(ready) : "memory");
    } while (!is_ready);
    *ready = 0;  // for the next launch; the sums stay until then
  }
  meet();
  const float4* from = h.sums + (blockIdx.x - 1) * OCTETS * CONSUMERS + threadIdx.x;
#pragma unroll
  for (int j = 0; j < OCTETS; ++j) {
    const float4 part = __ldcg(from + j * CONSUMERS);
    sum[4 * j] = part.x, sum[4 * j + 1] = part.y, sum[4 * j + 2] = part.z, sum[4 * j + 3] = part.w;
  }
}

template <int ACTIVE>
DEVICE void multiply_tiles(const Shared& shared, Walk& walk, const Epilogue& e, const Handover& handover,
                           bool& has_waited) {
  constexpr bool IS_EARLY = ACTIVE * OCTETS <= 2;  // few enough constants to hold on to
  constexpr int HELD = IS_EARLY ? ACTIVE * OCTETS : 1;
  const int warp = threadIdx.x / 32;
  Slice held[HELD];
  if (IS_EARLY) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      held[i].load_rows(e, walk.tile + i / OCTETS, warp, i % OCTETS);
    }
  }
  if (!has_waited) wait_for_dependencies();
  has_waited = true;
  if (IS_EARLY) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i].load_tokens(e);
  }
  float sum[ACTIVE][TOKENS / 2];
#if SPLIT == 0
  if (walk.first > 0) take_over(handover, sum[0]);
#endif
  multiply<ACTIVE>(shared, walk, sum, [&] {
    if (IS_EARLY) {
#pragma unroll
      for (int i = 0; i < HELD; ++i) held[i].complete_tokens(e);
    }
  });
#if SPLIT == 0
  if (walk.last < walk.chunks) {
    hand_over(handover, sum[0]);
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < ACTIVE * OCTETS; ++i) {
    Slice slice = held[IS_EARLY ? i : 0];
    if (!IS_EARLY) {
      slice.load_rows(e, walk.tile + i / OCTETS, warp, i % OCTETS);
      slice.load_tokens(e);
      slice.complete_tokens(e);
    }
    slice.store(e, &sum[i / OCTETS][4 * (i % OCTETS)]);
  }
}

template <int ACTIVE>
DEVICE void multiply_active(const Shared& shared, Walk& walk, const Epilogue& e, const Handover& handover,
                           bool& has_waited) {
  if (walk.active == ACTIVE) {
    multiply_tiles<ACTIVE>(shared, walk, e, handover, has_waited);
  } else if constexpr (ACTIVE > 1) {
    multiply_active<ACTIVE - 1>(shared, walk, e, handover, has_waited);
  }
}

// ---- a cluster on one group of row tiles ----

DEVICE u32 part_offset(int interval, int tile, int quarter, int octet) {
  return (((interval * ROW_TILES + tile) * OWNED + quarter) * OCTETS + octet) * PART_BYTES +
         threadIdx.x % 32 * 16;
}

template <int ACTIVE>
DEVICE void multiply_share(const Shared& shared, Walk& walk, const Epilogue& e, int chunks) {
  const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER;
  const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
  constexpr int SLICES = ACTIVE * OWNED * OCTETS;
  constexpr int ROUNDS = (SLICES + 3) / 4;
  const bool holds = warp < SLICES;  // one slice is prepared ahead; the rest come as they come
  Slice held;
  if (holds) {
    held.load_rows(e, walk.tile + warp / (OWNED * OCTETS),
                   rank * OWNED + warp / OCTETS % OWNED, warp % OCTETS);
  }
  wait_for_dependencies();
  if (holds) held.load_tokens(e);

  const u32 owner = warp / OWNED;
  const u32 parts = remote_address(shared.parts, owner);
  const u32 parts_full = remote_address(shared.parts_full, owner);
  cluster_wait();  // every block of the cluster has its barriers
  const auto send = [&](float (&part)[ACTIVE][TOKENS / 2], int chunk) {
#pragma unroll
    for (int i = 0; i < ACTIVE * OCTETS; ++i) {
      const float* p = &part[i / OCTETS][4 * (i % OCTETS)];
      store_remote(parts + part_offset(chunk / INTERVAL, i / OCTETS, warp % OWNED, i % OCTETS),
                   parts_full, p[0], p[1], p[2], p[3]);
    }
  };
  multiply_intervals<ACTIVE>(shared, walk, send, [&] {
    if (holds) held.complete_tokens(e);
  });
  barrier_wait_cluster(shared.parts_full, 0);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int i = 4 * round + warp;
    if (i >= SLICES) break;
    const int tile = i / (OWNED * OCTETS), quarter = i / OCTETS % OWNED, octet = i % OCTETS;
    float sum[4];
#pragma unroll 4
    for (int interval = 0; interval < intervals; ++interval) {
      float p[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(p[0]), "=f"(p[1]), "=f"(p[2]), "=f"(p[3])
                   : "r"(shared.parts + part_offset(interval, tile, quarter, octet)));
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = interval == 0 ? p[j] : __fadd_rn(sum[j], p[j]);
    }
    if (round > 0) {
      held.load_rows(e, walk.tile + tile, rank * OWNED + quarter, octet);
      held.load_tokens(e);
      held.complete_tokens(e);
    }
    held.store(e, sum);
  }
}

template <int ACTIVE>
DEVICE void multiply_active_share(const Shared& shared, Walk& walk, const Epilogue& e, int chunks) {
  if (walk.active == ACTIVE) {
    multiply_share<ACTIVE>(shared, walk, e, chunks);
  } else if constexpr (ACTIVE > 1) {
    multiply_active_share<ACTIVE - 1>(shared, walk, e, chunks);
  }
}

#if SPLIT == 0
#define HANDOVER_PARAMETERS , float4 *sums, int *ready
#define HANDOVER_VALUES sums, ready
#else
#define HANDOVER_PARAMETERS
#define HANDOVER_VALUES nullptr, nullptr
#endif

extern "C" __global__ void __launch_bounds__(THREADS, ROW_TILES * TOKENS <= 16 ? 2 : 1)
    decode(const __grid_constant__ TensorMap x, const u8* weight, int row_tiles, int chunks,
           EPILOGUE_PARAMETERS HANDOVER_PARAMETERS) {
  extern __shared__ u8 memory[];
  const Shared shared(shared_address(memory));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full + 8 * i, 1);
      barrier_init(shared.empty + 8 * i, CONSUMERS / 32);
    }
    if (CLUSTER > 1) {
      const Walk walk(row_tiles, chunks);
      const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
      barrier_init(shared.parts_full, 1);
      barrier_expect(shared.parts_full, intervals * walk.active * OWNED * OCTETS * PART_BYTES);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_arrive();
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) fill_ring(shared, &x, weight, row_tiles, chunks, tokens);
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
    return;
  }
  const Epilogue e = {EPILOGUE_VALUES};
  Walk walk(row_tiles, chunks);
#if SPLIT <= 1
  const Handover handover = {HANDOVER_VALUES};
  bool has_waited = false;
  for (; !walk.done(); walk.next_tiles()) multiply_active<ROW_TILES>(shared, walk, e, handover, has_waited);
  if (!has_waited) wait_for_dependencies();
#else
  multiply_active_share<ROW_TILES>(shared, walk, e, chunks);
#endif
}

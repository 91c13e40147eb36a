// Packed matrix product for many tokens: out[n, r] = sum over k of x[n, k] * weight[r, k].
//
// One persistent thread block per multiprocessor. Two warps feed shared memory, one with packed
// weight blocks, one with token tiles; two warpgroups multiply. A tile is 128 * WG_TILES weight
// rows by TILE_TOKENS tokens; each warpgroup has WG_TILES tiles of 64 rows. The CLUSTER thread blocks of
// a cluster work on the same rows and neighbouring token tiles: each fetches a share of the weights
// and multicasts it.
//
// Order of summation (that of every packed product): FP8 in intervals of 512, each a chain of wgmma
// from zero, added to the sum in float32; 16-bit types in one chain. To need only one row tile's
// interval besides the sums, the interval's token chunks stay in shared memory while a warpgroup
// goes through its row tiles one after the other.
//
// Macros: INPUT_TYPE (E4M3, BF16 or FP16), WG_TILES, TILE_TOKENS, CLUSTER, A_STAGES, B_STAGES, and those
// of epilogue.cuh.

#include "packed_linear/prefill_store.cuh"

constexpr int BLOCK_BYTES = 8192;  // a packed block: 64 rows x 128 bytes
constexpr bool IS_FP8 = INPUT_TYPE::bytes == 1;
constexpr int CHUNK = 128 / INPUT_TYPE::bytes;  // elements
constexpr int INTERVAL = IS_FP8 ? 4 : 1;        // chunks between which row tiles alternate
constexpr int WARPGROUPS = 2;
constexpr int LAST = WG_TILES - 1;  // row tile of a warpgroup
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int A_BYTES = WARPGROUPS * BLOCK_BYTES;
constexpr int B_BYTES = TILE_TOKENS * 128;
constexpr int GROUP_TOKENS = 2048;  // token tiles that go through the weights together

static_assert(CLUSTER == 1 || CLUSTER == WARPGROUPS, "a block fetches one warpgroup's weights");

// Copies into the same place of every block of the cluster; each block's barrier counts its bytes.
DEVICE void multicast_block(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "h"(u16((1 << CLUSTER) - 1))
      : "memory");
}

DEVICE void barrier_arrive_remote(u32 address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

DEVICE void cluster_sync() {  // also where a warp's threads come one by one
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

template <int STAGES>
struct Ring {  // a position in a ring of STAGES slots
  int slot = 0;
  u32 parity = 0;
  DEVICE void advance() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Shared {
  u32 a, b, staging, values, a_full, a_empty, b_full, b_empty;
  DEVICE explicit Shared(u32 base) {
    a = base;
    b = a + A_STAGES * A_BYTES;
    staging = b + B_STAGES * B_BYTES;
    values = staging + WARPGROUPS * STAGING_BYTES;
    a_full = values + WARPGROUPS * TokenValues<TILE_TOKENS>::BYTES;
    a_empty = a_full + 8 * A_STAGES;
    b_full = a_empty + 8 * A_STAGES;
    b_empty = b_full + 8 * B_STAGES;
  }
};

// Which tiles there are. A unit is what a cluster computes at a time.
struct Work {
  int row_tiles, chunks, tokens, rank;

  DEVICE int row_blocks() const {
    return (row_tiles + WARPGROUPS * WG_TILES - 1) / (WARPGROUPS * WG_TILES);
  }
  DEVICE int token_units() const { return (tokens + TILE_TOKENS * CLUSTER - 1) / (TILE_TOKENS * CLUSTER); }
  DEVICE int units() const { return row_blocks() * token_units(); }
  DEVICE int first() const { return blockIdx.x / CLUSTER; }
  DEVICE int stride() const { return gridDim.x / CLUSTER; }
  // Units that run at the same time share weights; a group of token tiles passes over all of them.
  DEVICE void at(int unit, int& row_block, int& token) const {
    constexpr int GROUP = GROUP_TOKENS / (TILE_TOKENS * CLUSTER);
    const int group = unit / (GROUP * row_blocks()), start = group * GROUP;
    const int width = min(GROUP, token_units() - start), rest = unit - start * row_blocks();
    row_block = rest / width;
    token = ((start + rest % width) * CLUSTER + rank) * TILE_TOKENS;
  }
  DEVICE int token(int unit) const {
    int row_block, first_token;
    at(unit, row_block, first_token);
    return first_token;
  }
};

DEVICE void load_weights(const Shared& shared, const Work& work, const u8* weight) {
  const u64 policy = evict_first_policy();
  Ring<A_STAGES> ring;
#pragma unroll 1
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    int row_block, token;
    work.at(unit, row_block, token);
    const int block_tile = row_block * WARPGROUPS * WG_TILES;
#pragma unroll 1
    for (int start = 0; start < work.chunks; start += INTERVAL) {
      const int end = min(start + INTERVAL, work.chunks);
#pragma unroll 1
      for (int tile = 0; tile < WG_TILES; ++tile) {
#pragma unroll 1
        for (int chunk = start; chunk < end; ++chunk, ring.advance()) {
          const u32 full = shared.a_full + 8 * ring.slot;
          barrier_wait(shared.a_empty + 8 * ring.slot, ring.parity ^ 1);
          barrier_expect(full, A_BYTES);
          const auto copy = [&](int warpgroup) {
            int index = block_tile + warpgroup * WG_TILES + tile;
            index = min(index, work.row_tiles - 1);  // what lies beyond is computed and dropped
            const u8* from = weight + (u64(index) * work.chunks + chunk) * BLOCK_BYTES;
            const u32 to = shared.a + ring.slot * A_BYTES + warpgroup * BLOCK_BYTES;
            if (CLUSTER == 1) {
              copy_block(to, from, BLOCK_BYTES, full, policy);
            } else {
              multicast_block(to, from, BLOCK_BYTES, full);
            }
          };
          if (CLUSTER == 1) {
#pragma unroll
            for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) copy(warpgroup);
          } else {
            copy(work.rank);
          }
        }
      }
    }
  }
}

DEVICE void load_tokens(const Shared& shared, const Work& work, const TensorMap* x) {
  const u64 policy = evict_last_policy();
  Ring<B_STAGES> ring;
#pragma unroll 1
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    int row_block, token;
    work.at(unit, row_block, token);
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk, ring.advance()) {
      const u32 full = shared.b_full + 8 * ring.slot;
      barrier_wait(shared.b_empty + 8 * ring.slot, ring.parity ^ 1);
      barrier_expect(full, B_BYTES);
      copy_box(shared.b + ring.slot * B_BYTES, x, chunk * CHUNK, token, full, policy);
    }
  }
}

// One warpgroup's way through the rings. A slot is released when the products that read it are
// done, which is known one chunk later.
struct Consumer {
  const Shared& shared;
  int warpgroup;
  Ring<A_STAGES> a, a_done;  // next to multiply, next to release
  Ring<B_STAGES> b, b_done;

  DEVICE void release_a(int slot) const {
    const u32 empty = shared.a_empty + 8 * slot, lane = threadIdx.x % 32;
    if (CLUSTER == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else if (lane < CLUSTER) {
      barrier_arrive_remote(remote_address(empty, lane));
    }
  }
  DEVICE void release_b(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.b_empty + 8 * slot);
  }

  // 64 rows x TILE_TOKENS tokens x one chunk, added to `sum` or in its place.
  DEVICE void multiply(float (&sum)[TILE_TOKENS / 2], int b_slot, bool is_first) const {
    const u64 rows = operand(shared.a + a.slot * A_BYTES + warpgroup * BLOCK_BYTES);
    const u64 tokens = operand(shared.b + b_slot * B_BYTES);
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Product<INPUT_TYPE, TILE_TOKENS>::add(sum, rows + 2 * k, tokens + 2 * k, k > 0 || !is_first);
    }
    product_commit();
  }

  DEVICE void release(bool is_last) {
    release_a(a_done.slot);
    a_done.advance();
    if (is_last) {
      release_b(b_done.slot);
      b_done.advance();
    }
  }

  // Begins part = 64 rows x TILE_TOKENS tokens x `count` chunks. The first row tile waits for the
  // tokens, the last one releases them. Slots are released one product later, or, to `hold`, in
  // `end`: then all products run on while the caller does something else.
  DEVICE void begin(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
#pragma unroll 1
    for (int chunk = 0; chunk < count; ++chunk) {
      if (tile == 0) barrier_wait(shared.b_full + 8 * b.slot, b.parity);
      barrier_wait(shared.a_full + 8 * a.slot, a.parity);
      multiply(part, b.slot, chunk == 0);
      if (chunk > 0 && !hold) {
        product_wait<1>();
        release(tile == LAST);
      }
      a.advance();
      b.advance();
    }
  }
  DEVICE void end(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
    product_wait<0>();
    keep_order(part);
    const int left = hold ? count : 1;
#pragma unroll 1
    for (int i = 0; i < left; ++i) release(tile == LAST);
  }

  // All chunks in one chain per row tile.
  DEVICE void chains(float (&sum)[WG_TILES][TILE_TOKENS / 2], int chunks) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(shared.b_full + 8 * b.slot, b.parity);
#pragma unroll
      for (int tile = 0; tile < WG_TILES; ++tile) {
        barrier_wait(shared.a_full + 8 * a.slot, a.parity);
        multiply(sum[tile], b.slot, chunk == 0);
        if (chunk > 0 || tile > 0) {
          product_wait<1>();
          release(tile == 0);  // of the product before, which was the last of its chunk if this is
        }                      // the first of the next
        a.advance();
      }
      b.advance();
    }
    product_wait<0>();
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) keep_order(sum[tile]);
    release(true);
  }
};

// Stores one row tile of a unit.
struct Store {
  const Epilogue& epilogue;
  const Shared& shared;
  const Work& work;
  int warpgroup;

  DEVICE void keep(const TokenValues<TILE_TOKENS>& token_values) const {
    token_values.keep(values());
  }
  DEVICE u32 values() const {
    return shared.values + warpgroup * TokenValues<TILE_TOKENS>::BYTES;
  }
  DEVICE void operator()(const float (&sum)[TILE_TOKENS / 2], int unit, int tile) const {
    int row_block, token;
    work.at(unit, row_block, token);
    store_tile<TILE_TOKENS>(epilogue, sum, (row_block * WARPGROUPS + warpgroup) * WG_TILES + tile,
                            work.row_tiles, token, shared.staging + warpgroup * STAGING_BYTES,
                            values(), warpgroup);
  }
};

DEVICE void clear(float (&sum)[TILE_TOKENS / 2]) {  // to what changes no number when added
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = -0.0f;
}

DEVICE void add(float (&sum)[TILE_TOKENS / 2], const float (&part)[TILE_TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
}

// Sums are stored while other products run: those of the first of two row tiles during the last
// interval of the second, those of the last row tile during the first interval of the next unit.
DEVICE void consume_intervals(Consumer& consumer, const Work& work, const Store& store) {
  float sum[WG_TILES][TILE_TOKENS / 2], part[TILE_TOKENS / 2];
#pragma unroll
  for (int tile = 0; tile < WG_TILES; ++tile) clear(sum[tile]);
  int before = -1;
#pragma unroll 1
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(unit));
#pragma unroll 1
    for (int start = 0; start < work.chunks; start += INTERVAL) {
      const int count = min(INTERVAL, work.chunks - start);
      const bool is_first = start == 0, is_last = start + INTERVAL >= work.chunks;
      const Ring<B_STAGES> b_start = consumer.b;
      const bool store_before = is_first && before >= 0;
      consumer.begin(part, count, 0, store_before);
      if (store_before) {
        store(sum[LAST], before, LAST);
        clear(sum[LAST]);
      }
      if (is_first) store.keep(token_values);
      consumer.end(part, count, 0, store_before);
      add(sum[0], part);
      if (WG_TILES == 1) continue;
      consumer.b = b_start;
      consumer.begin(part, count, LAST, is_last);
      if (is_last) {
        store(sum[0], unit, 0);
        clear(sum[0]);
      }
      consumer.end(part, count, LAST, is_last);
      add(sum[LAST], part);
    }
    before = unit;
  }
  if (before >= 0) store(sum[LAST], before, LAST);
}

DEVICE void consume_chains(Consumer& consumer, const Work& work, const Store& store) {
#pragma unroll 1
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(unit));
    float sum[WG_TILES][TILE_TOKENS / 2];
    consumer.chains(sum, work.chunks);
    store.keep(token_values);
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) store(sum[tile], unit, tile);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill(const __grid_constant__ TensorMap x, const u8* __restrict__ weight, int row_tiles,
            int chunks, EPILOGUE_PARAMETERS) {
  extern __shared__ __align__(1024) u8 raw[];  // the alignment of swizzled blocks
  launch_dependents();
  const Shared shared(shared_address(raw));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < A_STAGES; ++i) {
      barrier_init(shared.a_full + 8 * i, 1);
      barrier_init(shared.a_empty + 8 * i, CONSUMER_WARPS * CLUSTER);
    }
    for (int i = 0; i < B_STAGES; ++i) {
      barrier_init(shared.b_full + 8 * i, 1);
      barrier_init(shared.b_empty + 8 * i, CONSUMER_WARPS);
    }
    barrier_init_fence();
    prefetch_map(&x);
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  const Work work{row_tiles, chunks, tokens, CLUSTER == 1 ? 0 : int(cluster_rank())};
  if (warp >= CONSUMER_WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == CONSUMER_WARPS && lane == 0) {
      load_weights(shared, work, weight);
    } else if (warp == CONSUMER_WARPS + 1 && lane == 0) {
      wait_for_dependencies();
      load_tokens(shared, work, &x);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warpgroup = warp / 4;
    const Epilogue epilogue{EPILOGUE_VALUES};
    Consumer consumer{shared, warpgroup, {}, {}, {}, {}};
    const Store store{epilogue, shared, work, warpgroup};
    wait_for_dependencies();
    if constexpr (IS_FP8) {
      consume_intervals(consumer, work, store);
    } else {
      consume_chains(consumer, work, store);
    }
  }
  if (CLUSTER > 1) cluster_sync();  // a neighbour may still write here
}

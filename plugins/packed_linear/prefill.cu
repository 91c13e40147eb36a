// Packed matrix product for many tokens: out[n, r] = sum_k x[n, k] * weight[r, k].
//
// One persistent thread block per multiprocessor. Two warps feed shared memory, one with packed
// weight blocks, one with token tiles; two warpgroups multiply. A tile is 128 * WG_TILES weight
// rows by TOKENS tokens, and each warpgroup has WG_TILES tiles of 64 rows. A cluster of CLUSTER
// thread blocks works on the same weight rows and neighbouring token tiles: each block fetches a
// share of the weights and multicasts it.
//
// Order of summation (the same in every packed product): FP8 in intervals of 512, each a chain of
// wgmma from zero, added to the sum in float32; 16-bit types in one chain. To keep only one
// interval's accumulators besides the sums, an interval's token chunks stay in shared memory while
// a warpgroup goes through its row tiles one after the other.
//
// Macros: ELEMENT (0 e4m3, 1 bf16, 2 f16), MODEL (1 bf16, 2 f16), EPILOGUE (below), BIAS,
// PER_TOKEN, WG_TILES, TOKENS, CLUSTER, A_STAGES, B_STAGES; for EPILOGUE_ROPE also HEAD_SIZE,
// NUM_HEADS, NUM_KV_HEADS, TOKENS_PER_BLOCK and KV_FP8.

#define EPILOGUE_MODEL 0    // T
#define EPILOGUE_FLOAT 1    // float32
#define EPILOGUE_SWIGLU 2   // silu(gate) * up as T
#define EPILOGUE_SWIGLU8 3  // the same, quantized
#define EPILOGUE_ROPE 4     // q as T; k and v to the cache

static_assert(CLUSTER == 1 || CLUSTER == 2, "a block of a pair fetches one warpgroup's weights");

#include "prefill_ptx.cuh"
#include "prefill_store.cuh"

constexpr int BLOCK_BYTES = 8192;              // a packed block: 64 rows x 128 bytes
constexpr int ELEMENTS = ELEMENT == 0 ? 128 : 64;  // of a chunk
constexpr int INTERVAL = 4;                    // chunks of an FP8 interval
constexpr int WARPGROUPS = 2;
constexpr int A_BYTES = WARPGROUPS * BLOCK_BYTES;
constexpr int B_BYTES = TOKENS * 128;
constexpr int GROUP_TOKENS = 2048;  // token tiles that go through the weights together
constexpr int CONSUMER_WARPS = WARPGROUPS * 4;

// A position in a ring of STAGES slots.
template <int STAGES>
struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    DEVICE_MEMBER void advance() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Tile {
    int row_block, token_tile;
};

struct Work {
    int row_blocks, token_units;  // a unit: the CLUSTER token tiles of a cluster
    DEVICE_MEMBER Work(int row_tiles, int tokens) {
        row_blocks = (row_tiles + WARPGROUPS * WG_TILES - 1) / (WARPGROUPS * WG_TILES);
        token_units = (tokens + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER);
    }
    DEVICE_MEMBER int count() const { return row_blocks * token_units; }
    // Neighbours in time share weights; a group of token units passes over all weights.
    DEVICE_MEMBER Tile at(int index, int rank) const {
        constexpr int GROUP = GROUP_TOKENS / (TOKENS * CLUSTER);
        const int group = index / (GROUP * row_blocks), first = group * GROUP;
        const int width = min(GROUP, token_units - first), rest = index - first * row_blocks;
        return {rest / width, (first + rest % width) * CLUSTER + rank};
    }
};

struct Shared {
    uint32_t a, b, staging, a_full, a_empty, b_full, b_empty;
    DEVICE_MEMBER explicit Shared(uint32_t base) {
        a = base;
        b = a + A_STAGES * A_BYTES;
        staging = b + B_STAGES * B_BYTES;
        a_full = staging + WARPGROUPS * STAGING_BYTES;
        a_empty = a_full + 8 * A_STAGES;
        b_full = a_empty + 8 * A_STAGES;
        b_empty = b_full + 8 * B_STAGES;
    }
};

DEVICE void load_weights(
    const Shared& shared, const uint8_t* weight, const Work& work, int row_tiles, int chunks,
    int rank) {
    Ring<A_STAGES> ring;
    const auto load = [&](int row_block, int half, int chunk) {
        const uint32_t full = shared.a_full + 8 * ring.slot;
        barrier_wait(shared.a_empty + 8 * ring.slot, ring.phase ^ 1);
        barrier_expect(full, A_BYTES);
        const uint32_t slot = shared.a + ring.slot * A_BYTES;
        const auto copy = [&](int group) {
            int tile = (row_block * WARPGROUPS + group) * WG_TILES + half;
            tile = min(tile, row_tiles - 1);  // rows beyond the last are computed and dropped
            const uint8_t* from = weight + (size_t(tile) * chunks + chunk) * BLOCK_BYTES;
            const uint32_t to = slot + group * BLOCK_BYTES;
            if (CLUSTER == 1) {
                bulk_copy(to, from, BLOCK_BYTES, full);
            } else {
                bulk_multicast(to, from, BLOCK_BYTES, full, (1 << CLUSTER) - 1);
            }
        };
        if (CLUSTER == 1) {
#pragma unroll
            for (int group = 0; group < WARPGROUPS; ++group) copy(group);
        } else {
            copy(rank);
        }
        ring.advance();
    };
    constexpr int SPAN = ELEMENT == 0 ? INTERVAL : 1;
    for (int i = blockIdx.x / CLUSTER; i < work.count(); i += gridDim.x / CLUSTER) {
        const int row_block = work.at(i, rank).row_block;
        for (int first = 0; first < chunks; first += SPAN) {
            const int end = min(first + SPAN, chunks);
#pragma unroll 1
            for (int half = 0; half < WG_TILES; ++half) {
#pragma unroll 1
                for (int chunk = first; chunk < end; ++chunk) load(row_block, half, chunk);
            }
        }
    }
}

DEVICE void load_tokens(
    const Shared& shared, const TensorMap* map, const Work& work, int chunks, int rank) {
    Ring<B_STAGES> ring;
    for (int i = blockIdx.x / CLUSTER; i < work.count(); i += gridDim.x / CLUSTER) {
        const int token = work.at(i, rank).token_tile * TOKENS;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, ring.advance()) {
            const uint32_t full = shared.b_full + 8 * ring.slot;
            barrier_wait(shared.b_empty + 8 * ring.slot, ring.phase ^ 1);
            barrier_expect(full, B_BYTES);
            tile_copy(shared.b + ring.slot * B_BYTES, map, chunk * ELEMENTS, token, full);
        }
    }
}

// What a warpgroup multiplies: its rings, and which slots its pending products still read.
struct Consumer {
    const Shared& shared;
    int group, lane;
    Ring<A_STAGES> a;
    Ring<B_STAGES> b;

    DEVICE_MEMBER void release_a(int slot) const {
        const uint32_t empty = shared.a_empty + 8 * slot;
        if (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty);
        } else if (lane < CLUSTER) {
            barrier_arrive_at(empty, lane);
        }
    }
    DEVICE_MEMBER void release_b(int slot) const {
        if (lane == 0) barrier_arrive(shared.b_empty + 8 * slot);
    }
    // 64 rows x TOKENS tokens x one chunk, to sum[] or (fresh) in place of it.
    template <int N>
    DEVICE_MEMBER void multiply(float (&sum)[N], int b_slot, bool fresh) const {
        const uint64_t rows = operand(shared.a + a.slot * A_BYTES + group * BLOCK_BYTES);
        const uint64_t tokens = operand(shared.b + b_slot * B_BYTES);
        mma_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // 32 bytes each
            Mma<TOKENS>::run(sum, rows + 2 * k, tokens + 2 * k, k > 0 || !fresh);
        }
        mma_commit();
    }

#if ELEMENT == 0
    DEVICE_MEMBER void tile(float (&sum)[WG_TILES][TOKENS / 2], int chunks) {
        float part[TOKENS / 2];
        for (int first = 0; first < chunks; first += INTERVAL) {
            const int count = min(INTERVAL, chunks - first);
            const Ring<B_STAGES> start = b;
#pragma unroll
            for (int half = 0; half < WG_TILES; ++half) {
                b = start;
                int a_before = 0, b_before = 0;
#pragma unroll 1
                for (int chunk = 0; chunk < count; ++chunk) {
                    if (half == 0) barrier_wait(shared.b_full + 8 * b.slot, b.phase);
                    barrier_wait(shared.a_full + 8 * a.slot, a.phase);
                    multiply(part, b.slot, chunk == 0);
                    if (chunk > 0) {
                        mma_wait<1>();
                        release_a(a_before);
                        if (half == WG_TILES - 1) release_b(b_before);
                    }
                    a_before = a.slot;
                    b_before = b.slot;
                    a.advance();
                    b.advance();
                }
                mma_wait<0>();
                settle(part);
                release_a(a_before);
                if (half == WG_TILES - 1) release_b(b_before);
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) sum[half][i] = __fadd_rn(sum[half][i], part[i]);
            }
        }
    }
#else
    DEVICE_MEMBER void tile(float (&sum)[WG_TILES][TOKENS / 2], int chunks) {
        int a_before = 0, b_before = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(shared.b_full + 8 * b.slot, b.phase);
#pragma unroll
            for (int half = 0; half < WG_TILES; ++half) {
                barrier_wait(shared.a_full + 8 * a.slot, a.phase);
                multiply(sum[half], b.slot, chunk == 0);
                if (chunk > 0 || half > 0) {
                    mma_wait<1>();
                    release_a(a_before);
                    if (half == 0) release_b(b_before);
                }
                a_before = a.slot;
                a.advance();
            }
            b_before = b.slot;
            b.advance();
        }
        mma_wait<0>();
#pragma unroll
        for (int half = 0; half < WG_TILES; ++half) settle(sum[half]);
        release_a(a_before);
        release_b(b_before);
    }
#endif
};

extern "C" __global__ void __launch_bounds__(384, 1) prefill(
    const __grid_constant__ TensorMap x, const uint8_t* __restrict__ weight,
    const float* __restrict__ weight_scale, const float* __restrict__ x_scale,
    const uint16_t* __restrict__ bias, void* out, const float* __restrict__ out_scale,
    const float* __restrict__ rotary, const float* __restrict__ k_scale,
    const float* __restrict__ v_scale, void* kv_cache, const int* __restrict__ positions,
    const int* __restrict__ slots, int tokens, int rows, int row_tiles, int chunks) {
    extern __shared__ uint8_t raw[];
    launch_dependents();
    const Shared shared((shared_address(raw) + 1023) & ~1023u);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = CLUSTER == 1 ? 0 : cluster_rank();
    const Work work(row_tiles, tokens);
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
    if (warp >= CONSUMER_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == CONSUMER_WARPS && lane == 0) {
            load_weights(shared, weight, work, row_tiles, chunks, rank);
        } else if (warp == CONSUMER_WARPS + 1 && lane == 0) {
            wait_for_previous();
            load_tokens(shared, &x, work, chunks, rank);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous();
        const int group = warp / 4;
        const Output output{weight_scale, x_scale,   bias,  out,  out_scale, rotary, k_scale, v_scale,
                            kv_cache,     positions, slots, tokens, rows};
        Consumer consumer{shared, group, lane, {}, {}};
        for (int i = blockIdx.x / CLUSTER; i < work.count(); i += gridDim.x / CLUSTER) {
            float sum[WG_TILES][TOKENS / 2];
#if ELEMENT == 0
#pragma unroll
            for (int half = 0; half < WG_TILES; ++half) {
                // -0 is the number that changes no other when added
#pragma unroll
                for (int j = 0; j < TOKENS / 2; ++j) sum[half][j] = -0.0f;
            }
#endif
            consumer.tile(sum, chunks);
            const Tile tile = work.at(i, rank);
            if (tile.token_tile * TOKENS < tokens) {
                output.store(sum, (tile.row_block * WARPGROUPS + group) * WG_TILES,
                             tile.token_tile * TOKENS, shared.staging + group * STAGING_BYTES, group,
                             threadIdx.x % 128);
            }
        }
    }
    if (CLUSTER > 1) cluster_sync();  // a neighbour may still write to this block
}

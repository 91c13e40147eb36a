// Packed matrix product for few tokens: out[n, r] = sum_k x[n, k] * weight[r, k], as fast as the
// weights can be read.
//
// A thread block has one warp that copies and four that multiply. The copying thread keeps a ring
// of STAGES slots full: CHUNKS chunks of K (128 bytes each) of ROW_TILES tiles of 64 weight rows,
// and of TOKENS tokens. Weights depend on no other kernel, so the ring is filled with them before
// the kernel waits for its predecessor; only the token chunks are loaded after the wait. Blocks
// are persistent: each has a range of adjacent row tiles, and the ring continues with the next
// tiles while the last ones are stored.
//
// Order of summation (the same in every packed product): FP8 in intervals of 512 of K, each a
// chain of wgmma from zero, added to the sum in float32 in ascending order; 16-bit types in one
// chain over K. With SPLIT > 1 a cluster shares one group of row tiles, each block a range of
// intervals. Blocks send every interval's part to the block that owns its rows, and that block adds
// the parts in the same order. With SPLIT == 0 all blocks have the same number of intervals, and a
// tile shared by two blocks is summed by one after the other; every block must have some. K must have
// a multiple of CHUNKS chunks.
//
// With SHARERS 2, blocks of a cluster have the same weights and different tokens: each copies one half of the weights to
// both.
//
// 4-bit weights (MXFP4) have chunks of 256 columns, which are multiplied by two chunks of tokens. Warps
// expand them to E4M3 in registers for the same products.
//
// Macros: INPUT_TYPE (E4M3 | BF16 | FP16: of tokens), MXFP4 (0 | 1), TOKENS (8 ... 64), ROW_TILES,
// CHUNKS, STAGES, SPLIT (0 | 1 | 2 | 4), MAX_INTERVALS (room for parts if SPLIT > 1), FILL (slots
// requested at once during the first pass over the ring; 0: all), NORM (decode_norm.cuh), LEAVES
// (leaves.cuh), SHARERS (1 | 2), AHEAD (blocks that may load weights for others; decode_ring.cuh), and
// those of epilogue.cuh.
// Grid: x blocks (times SPLIT or SHARERS), y token tiles (divided by SHARERS).

#include "ops/packed_linear/decode_cluster.cuh"
#include "ops/packed_linear/decode_tiles.cuh"

#if SPLIT == 0
#define HANDOVER_PARAMETERS , float4 *sums, int *ready
#define HANDOVER_VALUES sums, ready
#else
#define HANDOVER_PARAMETERS
#define HANDOVER_VALUES nullptr, nullptr
#endif

// Blocks per multiprocessor, as far as registers allow.
constexpr bool HAS_MANY_REGISTERS = NORM ? UNITS > 3 || HIDDEN > 4096 : MXFP4 && ROW_TILES > 1;
constexpr int BLOCKS = ROW_TILES * TOKENS <= 16 && !HAS_MANY_REGISTERS ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS + HELPERS, BLOCKS)
    decode(TOKEN_PARAMETERS, const u8* weight, int row_tiles, int chunks,
           EPILOGUE_PARAMETERS HANDOVER_PARAMETERS) {
  extern __shared__ u8 memory[];
  const Shared shared(shared_address(memory));
  if (MXFP4) make_mxfp4_table(shared.table);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full + 8 * i, 1);
      barrier_init(shared.empty + 8 * i, SHARERS * CONSUMERS / 32);
      if (FILL > 0) barrier_init(shared.first + 8 * i, 1);
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
  if (SHARERS > 1) cluster_meet();
  Walk walk(row_tiles, chunks);
#if NORM
  const auto normalized = [&] {
    return Tokens(delta, residual, residual_out, norm_weight, epsilon, x_scale, tokens);
  };
  if (threadIdx.x >= THREADS) {
    normalized().wait(shared, walk, [] {});
    if (CLUSTER > 1) cluster_wait();
    return;
  }
#else
  const auto normalized = [] { return Tokens(); };
  if (FILL > 0 && threadIdx.x >= THREADS) {
    if (threadIdx.x == THREADS) first_tokens(shared, &x, row_tiles, chunks, tokens);
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
    return;
  }
#endif
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) {
#if NORM
      fill_ring(shared, weight, row_tiles, chunks);
#else
      fill_ring(shared, &x, weight, row_tiles, chunks, tokens);
#endif
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
    if (SHARERS > 1) cluster_meet();
    return;
  }
  const Epilogue e = {EPILOGUE_VALUES};
  const Tokens rows = normalized();
#if SPLIT <= 1
  const Handover handover = {HANDOVER_VALUES};
  bool has_waited = false;
  for (; !walk.done(); walk.next_tiles()) {
    multiply_active<ROW_TILES>(shared, walk, e, handover, rows, has_waited);
  }
  if (!has_waited) wait_for_dependencies();
#else
  multiply_active_share<ROW_TILES>(shared, walk, e, rows, chunks);
#endif
  if (SHARERS > 1) cluster_meet();  // whoever ends has no more to be told
}

// Packed matrix product for many tokens: out[n, r] = sum over k of x[n, k] * weight[r, k].
//
// One persistent thread block per multiprocessor. Two warps feed shared memory, one with packed
// weight blocks, one with token tiles; WARPGROUPS warpgroups multiply. A tile is 64 * WARPGROUPS * WG_TILES weight
// rows by TILE_TOKENS tokens; each warpgroup has WG_TILES tiles of 64 rows.
//
// Order of summation (that of every packed product): FP8 in intervals of 512, each a chain of wgmma
// from zero, added to the sum in float32; 16-bit types in one chain. So that registers are needed for only one
// row tile's interval besides the sums, the interval's token chunks stay in shared memory while a warpgroup
// processes two row tiles one after another. With one row tile there is room for two intervals' parts.
//
// Macros: INPUT_TYPE (E4M3, BF16 or FP16), EXPANDED (1: expand.cu writes the weights right before),
// WARPGROUPS, WG_TILES, TILE_TOKENS, A_STAGES, B_STAGES, EVEN (1: all blocks have equal shares of K, see
// prefill_walk.cuh), LEAVES (leaves.cuh), PER_TOKEN (1: each token has a scale), HAS_BIAS, and those of epilogue.cuh.

#include "ops/packed_linear/prefill_tiles.cuh"

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    prefill(const __grid_constant__ TensorMap x, const u8* __restrict__ weight, int row_tiles,
            int chunks, EPILOGUE_PARAMETERS HANDOVER_PARAMETERS) {
  extern __shared__ __align__(1024) u8 raw[];  // the alignment that swizzled blocks need
  if (!WRITES_CACHE) launch_dependents();
  const Shared shared(shared_address(raw));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < A_STAGES; ++i) {
      barrier_init(shared.a_full + 8 * i, ONE_RING ? 2 : 1);
      barrier_init(shared.a_empty + 8 * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < B_STAGES && !ONE_RING; ++i) {
      barrier_init(shared.b_full + 8 * i, 1);
      barrier_init(shared.b_empty + 8 * i, CONSUMER_WARPS);
    }
    barrier_init_fence();
    prefetch_map(&x);
  }
  __syncthreads();
  const Work work{row_tiles, chunks, tokens};
  if (warp >= CONSUMER_WARPS) {
    if (WARPGROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == CONSUMER_WARPS && lane == 0) {
      load_weights(shared, work, weight);
    } else if (warp == CONSUMER_WARPS + 1 && lane == 0) {
      wait_for_dependencies();
      if (WRITES_CACHE) launch_dependents();
      load_tokens(shared, work, &x);
    }
  } else {
    if (WARPGROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warpgroup = warp / 4;
    const Epilogue epilogue{EPILOGUE_VALUES};
    Consumer consumer{shared, warpgroup, {}, {}, {}, {}};
    const Handover handover{HANDOVER_VALUES};
#if EPILOGUE == 1
    const Divisor divisor(epilogue.scale);  // a constant of the engine, as weights are
#else
    const Divisor divisor(nullptr);
#endif
    const Store store{epilogue, handover, shared, work, divisor, warpgroup};
    wait_for_dependencies();
    if constexpr (IS_FP8) {
      consume_intervals(consumer, work, store);
    } else {
      consume_chains(consumer, work, store);
    }
  }
}

// Sums of the kernel for many tokens that a thread block has begun and the next one completes: in memory, warp by warp, each
// with a flag that the warp which takes them sets back.
#pragma once

#include "ops/packed_linear/prefill_load.cuh"

#if EVEN
#define HANDOVER_PARAMETERS , float4 *sums, int *ready
#define HANDOVER_VALUES sums, ready
#else
#define HANDOVER_PARAMETERS
#define HANDOVER_VALUES nullptr, nullptr
#endif

struct Handover {
  static constexpr int OCTETS = TILE_TOKENS / 8, THREADS = 32 * CONSUMER_WARPS;
  float4* sums;  // [blocks, WG_TILES, OCTETS, THREADS]
  int* ready;    // [blocks, WG_TILES, CONSUMER_WARPS]: 1 while sums wait for the next block

  static DEVICE int place(int block, int tile) { return block * WG_TILES + tile; }
  DEVICE int* flag(int block, int tile) const {
    return ready + place(block, tile) * CONSUMER_WARPS + threadIdx.x / 32;
  }

  DEVICE void leave(const float (&sum)[TILE_TOKENS / 2], int tile) const {
    float4* to = sums + place(blockIdx.x, tile) * (OCTETS * THREADS) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      __stcg(to + j * THREADS, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag(blockIdx.x, tile)) : "memory");
    }
  }

  // What the block of the rows before, which has the same tokens, has left.
  DEVICE void take(float (&sum)[TILE_TOKENS / 2], int tile, int token_tiles) const {
    const int block = blockIdx.x - token_tiles;
    if (threadIdx.x % 32 == 0) {
      int* its = flag(block, tile);
      int is_ready;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_ready) : "l"(its) : "memory");
      } while (!is_ready);
      *its = 0;  // for the next launch; the sums stay valid until then
    }
    __syncwarp();
    const float4* from = sums + place(block, tile) * (OCTETS * THREADS) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      const float4 x = __ldcg(from + j * THREADS);
      sum[4 * j] = x.x, sum[4 * j + 1] = x.y, sum[4 * j + 2] = x.z, sum[4 * j + 3] = x.w;
    }
  }
};

// Expands packed 4-bit weights to packed FP8 weights for the kernel for many tokens: there each weight is
// used by so many tokens that writing it and reading it again costs little.
//
// A thread block expands one packed block of 64 rows x 256 columns into two of 64 rows x 128 bytes in
// the layout of layout.py. It reads before the preceding kernel has ended and writes after that, because the
// preceding kernel may still read the weights of the previous product. Grid: blocks along K, row tiles.

#include "schemes/mxfp4/mxfp4.cuh"

constexpr int BLOCK_BYTES = 8 * MXFP4_OCTET_BYTES, HALF_BYTES = 8192;
constexpr int THREADS = 128;

DEVICE void expand_rows(u32 table, u32 block, u32 to) {
  const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
  u32 a[8][4];
  Mxfp4Chunk(table, block + warp * (2 * MXFP4_OCTET_BYTES)).expand(0, a);
#pragma unroll
  for (int i = 0; i < 32; ++i) {  // rows 8 apart, then columns 16 apart
    const int piece = i / 4 % 4 * 2 + i % 4 / 2;
    const u32 at = to + i / 16 * HALF_BYTES + (16 * warp + i % 2 * 8 + row) * 128 +
                   ((piece ^ row) << 4) + threadIdx.x % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(a[i / 4][i % 4]) : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expand(const u8* __restrict__ weight, uint4* __restrict__ expanded) {
  __shared__ __align__(1024) uint4 made[2 * HALF_BYTES / 16];
  __shared__ __align__(256) uint2 table[MXFP4_TABLE_BYTES / 8];
  __shared__ __align__(128) uint4 packed[BLOCK_BYTES / 16];
  launch_dependents();
  make_mxfp4_table(shared_address(table));
  const long long block = (long long)blockIdx.y * gridDim.x + blockIdx.x;
  const uint4* from = (const uint4*)(weight + block * BLOCK_BYTES);
  for (int i = threadIdx.x; i < BLOCK_BYTES / 16; i += THREADS) packed[i] = __ldcs(from + i);
  __syncthreads();
  expand_rows(shared_address(table), shared_address(packed), shared_address(made));
  __syncthreads();
  wait_for_dependencies();
  uint4* to = expanded + block * (2 * HALF_BYTES / 16);
#pragma unroll
  for (int i = 0; i < 2 * HALF_BYTES / 16 / THREADS; ++i) {
    to[i * THREADS + threadIdx.x] = made[i * THREADS + threadIdx.x];
  }
}

// Products of E4M3 numbers by each instruction that has them: d[64 x 128] = c + a[64 x DEPTH] b[128 x DEPTH]^T.
//
// Chains of 32 products at a time, in ascending order. WAY: 0 wgmma, both operands in shared memory; 1 wgmma, a in
// registers; 2 wgmma, eight columns at a time; 3 wgmma of the transposed operands, so a is the right one; 4 mma.sync.
// One thread block of 128 threads; a and b lie in memory row by row.

#include "backends/cuda/sm90/hopper.cuh"

constexpr int BLOCKS = DEPTH / 128;       // of 128 bytes of depth
constexpr int A_BYTES = 64 * 128, B_BYTES = 128 * 128;

#define FROM_REGISTERS(N, LIST, A0, A1, A2, A3, B, ...)                                              \
  DEVICE void add_from_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b) {                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" LIST "}, {%" #A0        \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1;"                                \
                 : __VA_ARGS__                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
  }
FROM_REGISTERS(128, I64, 64, 65, 66, 67, 68, D64(0))

// A row's bytes as operands of tensor cores: blocks of 128 bytes of depth, 16-byte parts swizzled.
DEVICE void stage(u8* target, const u8* from, int rows) {
  for (int i = threadIdx.x; i < rows * DEPTH / 16; i += 128) {
    const int row = i / (DEPTH / 16), part = i % (DEPTH / 16);
    u8* to = target + part / 8 * (rows * 128) + row * 128 + ((part % 8 ^ (row & 7)) << 4);
    *(uint4*)to = *(const uint4*)(from + 16 * i);
  }
}

// The four bytes of a left operand's row from `k` on.
DEVICE u32 word(const u8* a, int row, int k) { return *(const u32*)(a + row * DEPTH + k); }

DEVICE void left_words(u32 (&x)[4], const u8* a, int first_row, int k) {
  const int row = first_row + lane_id() / 4, at = k + lane_id() % 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = word(a, row + i % 2 * 8, at + i / 2 * 16);
}

// Moves a thread's sums of N columns from or to d; `down` and `across` are what a row and a column step over.
template <int N, bool STORES>
DEVICE void move(float (&x)[N / 2], float* d, int down, int across) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int row = threadIdx.x / 32 * 16 + lane_id() / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
    float& there = d[row * down + column * across];
    if (STORES) {
      there = x[i];
    } else {
      x[i] = there;
    }
  }
}

// A product's chain; `step` adds 32 of depth, given the block of 128 and its quarter.
template <int N, class Step>
DEVICE void chain(float* d, int down, int across, const Step& step) {
  float x[N / 2];
  move<N, false>(x, d, down, across);
  keep_order(x);
  product_fence();
#pragma unroll 1
  for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) step(x, block, quarter);
  }
  product_commit();
  product_wait<0>();
  keep_order(x);
  move<N, true>(x, d, down, across);
}

extern "C" __global__ void __launch_bounds__(128) multiply(const u8* a, const u8* b, float* d) {
  extern __shared__ __align__(1024) u8 memory[];
  u8* own_b = memory + BLOCKS * A_BYTES;
  stage(memory, a, 64);
  stage(own_b, b, 128);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const u32 left = shared_address(memory), right = shared_address(own_b);
#if WAY == 0
  chain<128>(d, 128, 1, [&](float (&x)[64], int block, int quarter) {
    Product<E4M3, 128>::add(x, operand(left + block * A_BYTES) + 2 * quarter,
                            operand(right + block * B_BYTES) + 2 * quarter, 1);
  });
#elif WAY == 1
  u32 words[4 * BLOCKS][4];
#pragma unroll
  for (int i = 0; i < 4 * BLOCKS; ++i) left_words(words[i], a, threadIdx.x / 32 * 16, 32 * i);
  float x[64];
  move<128, false>(x, d, 128, 1);
  keep_order(x);
  product_fence();
#pragma unroll
  for (int i = 0; i < 4 * BLOCKS; ++i) {
    add_from_registers(x, words[i], operand(right + i / 4 * B_BYTES) + 2 * (i % 4));
  }
  product_commit();
  product_wait<0>();
  keep_order(x);
  move<128, true>(x, d, 128, 1);
#elif WAY == 2
#pragma unroll 1
  for (int j = 0; j < 16; ++j) {
    chain<8>(d + 8 * j, 128, 1, [&](float (&x)[4], int block, int quarter) {
      Product<E4M3, 8>::add(x, operand(left + block * A_BYTES) + 2 * quarter,
                            operand(right + block * B_BYTES + j * 1024) + 2 * quarter, 1);
    });
  }
#elif WAY == 3
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    chain<64>(d + 64 * half, 1, 128, [&](float (&x)[32], int block, int quarter) {
      Product<E4M3, 64>::add(x, operand(right + block * B_BYTES + half * 8192) + 2 * quarter,
                             operand(left + block * A_BYTES) + 2 * quarter, 1);
    });
  }
#else
#pragma unroll 1
  for (int j = 0; j < 16; ++j) {
    float x[4];
    move<8, false>(x, d + 8 * j, 128, 1);
#pragma unroll 1
    for (int k = 0; k < DEPTH; k += 32) {
      u32 w[4];
      left_words(w, a, threadIdx.x / 32 * 16, k);
      const int column = 8 * j + lane_id() / 4, at = k + lane_id() % 4 * 4;
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
          : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(word(b, column, at)),
            "r"(word(b, column, at + 16)));
    }
    move<8, true>(x, d + 8 * j, 128, 1);
  }
#endif
}

// Bounds from the best logits that the kernel for many tokens has left so far: nearly all logits of a tile are below
// them, and a warp of which all are drops its own by one comparison each (prefill_best.cuh).
#pragma once

#include "ops/packed_linear/prefill_staging.cuh"

// Of the tokens of which a thread has sums. With parts of intervals, or sums of 256 tokens, there are no registers for them.
template <int TOKENS>
struct Bounds {
  static constexpr bool ARE_KNOWN = INPUT_TYPE::bytes == 2 && TOKENS <= 128;
  static constexpr u64 INFINITE = u64(0xff800000u) << 31;  // of no token: all logits are below
  float least[ARE_KNOWN ? TOKENS / 8 : 1][2];  // a smaller logit is not the best; NaN: any may be

  // At any time before the comparison: best logits of later are only larger.
  DEVICE void load(const Epilogue& e, int token0) {
    if constexpr (ARE_KNOWN) {
      u64 keys[TOKENS / 8][2];
#pragma unroll
      for (int i = 0; i < TOKENS / 4; ++i) {
        const int token = token0 + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        keys[i / 2][i % 2] = token < e.tokens ? *(const volatile u64*)(e.keys + token) : INFINITE;
      }
#pragma unroll
      for (int i = 0; i < TOKENS / 4; ++i) {
        const u32 order = u32(keys[i / 2][i % 2] >> 31);  // that of key_of; zero, where there is none yet, is NaN
        least[i / 2][i % 2] = __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
      }
    }
  }
};

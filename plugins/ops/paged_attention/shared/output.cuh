// The output of a kernel: sums divided by the sum of softmax weights, in the model type or quantized.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

// Two adjacent values of a row; their sums are multiplied by `factor`.
DEVICE u32 finish_pair(float low, float high, float factor, float quanta) {
  // + 0: no negative zeros
  const u32 pair =
      MODEL_TYPE::pack_pair(__fmaf_rn(low, factor, 0.0f), __fmaf_rn(high, factor, 0.0f));
  if (!STATIC) return pair;
  const float first = MODEL_TYPE::unpack(u16(pair)), second = MODEL_TYPE::unpack(u16(pair >> 16));
  return E4M3::pack_pair(__fmul_rn(first, quanta), __fmul_rn(second, quanta));
}

DEVICE void store_pair(OUT_TYPE::Storage* to, u32 pair) {
  if constexpr (OUT_TYPE::bytes == 1) {
    *(u16*)to = u16(pair);
  } else {
    *(u32*)to = pair;
  }
}

// Arithmetic of a norm and of the quantization after it, on pairs of the model type, with the same bits as
// plugins/ops/rms_norm. Macros: MODEL_TYPE, HIDDEN.
#pragma once

#include "backends/cuda/sm90/pairs.cuh"

typedef Pairs<MODEL_TYPE> Model;

// The scales that Divisor takes a reciprocal of.
template <class Type>
struct PlainScales;
template <>
struct PlainScales<BF16> {
  static constexpr float LEAST = 0x1p-80f, MOST = 0x1p80f;
};
template <>
struct PlainScales<FP16> {
  static constexpr float LEAST = 0x1p-24f, MOST = 0x1p5f;
};

// y / scale for FP8, rounded to nearest: one residual correction of the product with the rounded
// reciprocal, without a branch for each element. Values are first clamped to where they saturate
// anyway, because the correction is not defined for infinities. For scales near the ends of float32's range,
// scales whose bound is not normal in the model's type, and NaN a true division is used.
struct Divisor {
  float scale, inverse;
  u32 bound;  // two copies

  typedef PlainScales<MODEL_TYPE> Plain;

  DEVICE Divisor() {}
  DEVICE explicit Divisor(float scale_) : scale(scale_) {
    const bool is_plain = scale > Plain::LEAST && scale < Plain::MOST;
    inverse = is_plain ? __frcp_rn(scale) : 0.0f;
    bound = Model::pack(1024.0f * scale) * 0x10001u;
  }
  DEVICE u32 pair(u32 y) const {
    const u32 bounded = Model::clamp(y, bound);
    return E4M3::pack_pair(quotient(Model::low(bounded)), quotient(Model::high(bounded)));
  }
  DEVICE u16 any_pair(u32 y) const {
    if (inverse != 0.0f) return pair(y);
    return E4M3::pack_pair(__fdiv_rn(Model::low(y), scale), __fdiv_rn(Model::high(y), scale));
  }
  DEVICE uint2 unit(const uint4& y) const {
    uint2 out[1];
    units({y}, out);
    return out[0];
  }
  // For several groups of elements at once: with one branch for all, they do not wait for each other.
  template <int COUNT>
  DEVICE void units(const uint4 (&y)[COUNT], uint2 (&out)[COUNT]) const {
    if (inverse == 0.0f) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) out[i] = divide_truly(y[i], scale);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        out[i] = {pair(y[i].x) | pair(y[i].y) << 16, pair(y[i].z) | pair(y[i].w) << 16};
      }
    }
  }

 private:
  DEVICE float quotient(float x) const {
    const float rough = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-rough, scale, x), inverse, rough);
  }
  static __device__ __noinline__ uint2 divide_truly(const uint4 y, float scale) {
    const u32 pairs[4] = {y.x, y.y, y.z, y.w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = E4M3::pack_pair(__fdiv_rn(Model::low(pairs[i]), scale),
                               __fdiv_rn(Model::high(pairs[i]), scale));
    }
    return {out[0] | out[1] << 16, out[2] | out[3] << 16};
  }
};

// sum / HIDDEN, rounded to nearest.
DEVICE float mean(float sum) {
  constexpr float INVERSE = 1.0f / HIDDEN;
  const float rough = __fmul_rn(sum, INVERSE);
  if constexpr ((HIDDEN & (HIDDEN - 1)) == 0) return rough;
  const float exact = __fmaf_rn(__fmaf_rn(-rough, float(HIDDEN), sum), INVERSE, rough);
  return sum > 0x1p-80f && sum < 0x1p120f ? exact : __fdiv_rn(sum, float(HIDDEN));
}

// Squares of a pair of elements after those before it.
DEVICE float more_squares(float sum, u32 pair) {
  sum = __fmaf_rn(Model::low(pair), Model::low(pair), sum);
  return __fmaf_rn(Model::high(pair), Model::high(pair), sum);
}

// Squares of a thread's eight elements, added in order.
DEVICE float square_sum(const uint4& h) {
  const float first = Model::low(h.x), second = Model::high(h.x);
  const float sum = __fmaf_rn(first, first, __fmul_rn(second, second));
  return more_squares(more_squares(more_squares(sum, h.y), h.z), h.w);
}
// Of eight more elements of the same thread, where rows are longer than 32 warps of eight.
DEVICE float square_sum(const uint4& h, float before) {
  return more_squares(more_squares(more_squares(more_squares(before, h.x), h.y), h.z), h.w);
}

DEVICE u32 normal_pair(u32 h, u32 factor, float inverse) {
  const u32 normal = MODEL_TYPE::pack_pair(__fmul_rn(Model::low(h), inverse),
                                           __fmul_rn(Model::high(h), inverse));
  return Model::multiply(normal, factor);
}
DEVICE uint4 normal_unit(const uint4& h, const uint4& factors, float inverse) {
  return {normal_pair(h.x, factors.x, inverse), normal_pair(h.y, factors.y, inverse),
          normal_pair(h.z, factors.z, inverse), normal_pair(h.w, factors.w, inverse)};
}
DEVICE uint4 add_units(const uint4& a, const uint4& b) {
  return {Model::add(a.x, b.x), Model::add(a.y, b.y), Model::add(a.z, b.z), Model::add(a.w, b.w)};
}

// 1 / sqrt(mean square + epsilon) from the row's parts, a warp's each, in shared memory: lanes hold
// one part each and combine them by butterfly shuffles.
DEVICE float inverse_rms_of(u32 squares, float epsilon) {
  constexpr int PARTS = HIDDEN / 256;
  constexpr int FIRST_STEP = PARTS > 16 ? 16 : PARTS > 8 ? 8 : PARTS > 4 ? 4 : 2;
  const int lane = threadIdx.x % (2 * FIRST_STEP);
  float sum;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(squares + lane * 4) : "memory");
  if (PARTS < 2 * FIRST_STEP && lane >= PARTS) sum = 0.0f;
#pragma unroll
  for (int step = FIRST_STEP; step > 0; step /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
  }
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(mean(sum), epsilon)));
  return inverse;
}

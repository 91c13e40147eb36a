// Conversion of rows of the model type to FP8 or INT8, as the kernel for many tokens stores them.
#pragma once

#include "ops/packed_linear/epilogue.cuh"

// Division by a scale that is the same for many values: the quotient __fdiv_rn gives, because one
// correction with a correctly rounded reciprocal rounds correctly (Markstein). Infinity is preserved, and the
// sign of zero, as what is too much is taken away rather than what is missing added.
struct Divisor {
  float scale, reciprocal;
  DEVICE explicit Divisor(const float* pointer) {
    scale = pointer ? __ldg(pointer) : 1.0f;
    reciprocal = __frcp_rn(scale);
  }
  DEVICE float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal);
    const float better = __fmaf_rn(__fmaf_rn(quotient, scale, -x), -reciprocal, quotient);
    return fabsf(quotient) < __uint_as_float(0x7F800000) ? better : quotient;
  }
};

// Eight values of the model type, divided, to a type of one byte.
template <class Type>
DEVICE uint2 quantize_unit(uint4 unit, const Divisor& divisor) {
  const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
  u32 quantized[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = divisor.divide(MODEL_TYPE::unpack(u16(pairs[i])));
    const float high = divisor.divide(MODEL_TYPE::unpack(u16(pairs[i] >> 16)));
    quantized[i / 2] |= u32(Type::pack_pair(low, high)) << (16 * (i % 2));
  }
  return {quantized[0], quantized[1]};
}

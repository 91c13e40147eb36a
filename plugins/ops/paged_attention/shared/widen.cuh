// Conversion of 8-bit values in registers to the operand types of products.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

// Bytes 0 and 1, and bytes 2 and 3, as two pairs of float16.
template <class Type>
struct Widen {  // 16-bit values need no conversion
  static DEVICE void pairs(u32, u32&, u32&) {}
};
template <>
struct Widen<E4M3> {
  static DEVICE void pairs(u32 x, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(x));
  }
};
template <>
struct Widen<INT8> {  // 1024 to 2048 are 1 apart in float16: 0x6400 and an offset byte, less 1152
  static DEVICE u32 pair(u32 x, u32 which) {
    u32 y;
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(y)
        : "r"(__byte_perm(x ^ 0x80808080u, 0x64646464u, which)), "r"(0x64806480u));
    return y;
  }
  static DEVICE void pairs(u32 x, u32& low, u32& high) {
    low = pair(x, 0x4140), high = pair(x, 0x4342);
  }
};

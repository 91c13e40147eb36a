// Arithmetic on two elements of a 16-bit type at once, each rounded once.
//
// That is what float32 arithmetic of such elements gives when it is rounded to the type: float32 holds
// products exactly, and has so many bits more that sums, too, are rounded as if once.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

template <class Type>
struct Pairs;

#define PAIR_OPERATION(NAME, INSTRUCTION)                                                          \
  static DEVICE u32 NAME(u32 a, u32 b) {                                                           \
    u32 y;                                                                                         \
    asm(INSTRUCTION " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));                                    \
    return y;                                                                                      \
  }
#define PAIRS(TYPE, NAME)                                                                          \
  template <>                                                                                      \
  struct Pairs<TYPE> {                                                                             \
    PAIR_OPERATION(add, "add.rn." NAME)                                                            \
    PAIR_OPERATION(subtract, "sub.rn." NAME)                                                       \
    PAIR_OPERATION(multiply, "mul.rn." NAME)                                                       \
    static DEVICE u32 clamp(u32 a, u32 bound) { /* NaN stays NaN */                                \
      u32 y;                                                                                       \
      asm("min.NaN." NAME " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(bound));                          \
      asm("max.NaN." NAME " %0, %0, %1;" : "+r"(y) : "r"(bound ^ 0x80008000u));                    \
      return y;                                                                                    \
    }                                                                                              \
    static DEVICE u32 pack(float a) { return TYPE::pack(a); }                                      \
    static DEVICE float low(u32 a) { return TYPE::unpack(u16(a)); }                                \
    static DEVICE float high(u32 a) { return TYPE::unpack(u16(a >> 16)); }                         \
  };
PAIRS(BF16, "bf16x2")
PAIRS(FP16, "f16x2")
#undef PAIRS
#undef PAIR_OPERATION

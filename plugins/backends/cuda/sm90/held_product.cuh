// Products of E4M3 numbers whose left operand is in registers; `HELD_PRODUCT` makes that of one width.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

// d[64 x N] = (add ? d : 0) + a[64 x 32] b[N x 32]^T as `Product` (hopper.cuh), with `a` in registers:
// of warp w, thread 4 g + t, a[0] are the four bytes of row 16 w + g from column 4 t, a[1] those of row
// 16 w + 8 + g, a[2] and a[3] the same rows from column 16 + 4 t.
template <int N>
struct HeldProduct;

#define HELD_PRODUCT(N, LIST, A0, A1, A2, A3, B, P, ...)                                         \
  template <>                                                                                   \
  struct HeldProduct<N> {                                                                       \
    static DEVICE void add(float (&d)[N / 2], const u32* a, u64 b, int add) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" LIST "}, {%" #A0  \
                   ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;\n}"                        \
                   : __VA_ARGS__                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));             \
    }                                                                                           \
  };

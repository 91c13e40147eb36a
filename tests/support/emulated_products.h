// Products of a warp's matrices, and of warpgroups: these happen when they are waited for, so that what is overwritten too
// early shows.
#pragma once

#include "emulated_numbers.h"

namespace emu {
u32 transposed(u32 x);
// d += a[16 x 16] b[16 x 8]; sums of another order than a GPU's, the same for all that computes them here.
void multiply(bool is_half, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
inline void multiply(const char* types, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                     u32 b1) {
  multiply(types[0] == 'f', d0, d1, d2, d3, a0, a1, a2, a3, b0, b1);
}
void add_product(float* d, int columns, u64 a, u64 b, int add, bool is_e4m3 = false);  // both in shared memory
void add_product(float* d, int columns, const u32* a, u64 b, int add);
void commit_products();
void wait_for_products(int pending);
}  // namespace emu

inline emu::u64 operand(emu::u32 address) {
  return emu::u64(address >> 4) | emu::u64(1024 >> 4) << 32;
}
inline void product_fence() {}
inline void product_commit() { emu::commit_products(); }
template <int PENDING>
void product_wait() { emu::wait_for_products(PENDING); }
template <int COUNT>
void keep_order(float (&)[COUNT]) {}

template <class Input, int N>
struct Product {
  static void add(float (&d)[N / 2], emu::u64 a, emu::u64 b, int add) {
    if (Input::bytes == 2 && Input::pack(1.0f) != 0x3C00) emu::fail("products of BF16");
    emu::add_product(d, N, a, b, add, Input::bytes == 1);
  }
};

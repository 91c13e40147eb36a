// Products of warpgroups on a CPU: they happen when they are waited for, so that what is overwritten too early shows.
#pragma once

#include "emulated_numbers.h"

namespace emu {
inline void add_product(float* d, int columns, u64 a, u64 b, int add, bool is_e4m3 = false) {  // both in shared memory
  now->open_products.push_back({d, {}, b, columns, add, a | u64(1) << 63, is_e4m3});
}
inline void add_product(float* d, int columns, const u32* a, u64 b, int add) {
  now->open_products.push_back({d, {a[0], a[1], a[2], a[3]}, b, columns, add});
}
// A 16-bit number of a right operand: rows of 128 bytes with the 128-byte swizzle, atoms of eight as far apart as it says. Of
// a transposed one, which says how far apart 64 of its rows are, lines of 128 bytes are numbers k.
inline float of_operand(u64 operand, int row, int k) {
  static const std::vector<float> numbers = [] {
    std::vector<float> all(1 << 16);
    for (u32 h = 0; h < 1 << 16; ++h) all[h] = from_half(u16(h));
    return all;
  }();
  u32 at = u32(operand & 0x3FFF) << 4;
  const u32 far = u32(operand >> 32 & 0x3FFF) << 4, beside = u32(operand >> 16 & 0x3FFF) << 4;
  if (beside > 16) at += row / 64 * beside + k / 8 * far + k % 8 * 128 + row % 64 * 2;
  else at += row / 8 * far + row % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  if (at + 2 > now->own->size) fail("an operand outside of shared memory", at);
  return numbers[*(const u16*)(now->own->memory + at)];
}
struct Fp8 { float number; int exponent; };  // of an E4M3 number's code
inline const Fp8* fp8_numbers() {
  static const std::vector<Fp8> numbers = [] {
    std::vector<Fp8> all(256);
    for (int x = 0; x < 256; ++x) all[x] = {from_half(half_of_e4m3(u8(x))), std::max(x >> 3 & 15, 1) - 7};
    return all;
  }();
  return numbers.data();
}
// Products of E4M3 numbers, 32 deep where those of 16 bits are 16 deep, as tensor cores add them (fp8_sums.py).
inline void finish_fp8(const Product& its) {
  const Fp8* numbers = fp8_numbers();
  std::memcpy(warp().shown[lane()], its.a, 16);
  sync_warp();
  for (int i = 0; i < its.columns / 2; ++i) {
    const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    const float sum = its.add ? its.d[i] : 0.0f;
    int most = -1000;
    if (sum != 0) std::frexp(sum, &most), --most;
    float products[32];
    for (int k = 0; k < 32; ++k) {
      const u32* a = (const u32*)warp().shown[lane() / 4 * 4 + k % 16 / 4];
      u32 at = (u32(its.b & 0x3FFF) << 4) + column / 8 * (u32(its.b >> 32 & 0x3FFF) << 4) + column % 8 * 128 + k;
      at ^= (at >> 7 & 7) << 4;
      if (at >= now->own->size) fail("an operand outside of shared memory", at);
      const Fp8 left = numbers[a[i / 2 % 2 + k / 16 * 2] >> k % 4 * 8 & 255], right = numbers[now->own->memory[at]];
      products[k] = left.number * right.number;
      if (products[k] != 0) most = std::max(most, left.exponent + right.exponent);
    }
    const double unit = most > -1000 ? std::ldexp(1.0, 13 - most) : 1.0;
    double all = double((long long)(sum * unit));  // all parts are cut towards zero
    for (float x : products) all += x == x ? double((long long)(x * unit)) : NAN;
    its.d[i] = number(bits(float(all / unit)) & ~1023u);
  }
  sync_warp();
}
// Sums of another order than a GPU's, the same for all that computes them here.
inline void finish(Product its) {
  if (its.left) {
    for (int i = 0; i < 4; ++i) {
      const int row = now->thread.x / 32 % 4 * 16 + lane() / 4 + i % 2 * 8;
      u32 at = (u32(its.left & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128 + lane() % 4 * 4 + i / 2 * 16;
      at ^= (at >> 7 & 7) << 4;
      if (at + 4 > now->own->size) fail("an operand outside of shared memory", at);
      std::memcpy(&its.a[i], now->own->memory + at, 4);
    }
  }
  if (its.is_e4m3) return finish_fp8(its);
#ifdef FP8_PRODUCTS
  return finish_fp8(its);
#endif
  for (int i = 0; i < 8; ++i) {
    ((float*)warp().shown[lane()])[i] = from_half(u16(its.a[i / 2] >> i % 2 * 16));
  }
  sync_warp();
  for (int i = 0; i < its.columns / 2; ++i) {
    double sum = its.add ? its.d[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float* a = (const float*)warp().shown[lane() / 4 * 4 + k % 8 / 2];
      sum += double(a[2 * (i / 2 % 2 + k / 8 * 2) + k % 2]) *
             of_operand(its.b, i / 4 * 8 + lane() % 4 * 2 + i % 2, k);
    }
    its.d[i] = float(sum);
  }
  sync_warp();
}
}  // namespace emu

inline emu::u64 operand(emu::u32 address) {
  return emu::u64(address >> 4) | emu::u64(1024 >> 4) << 32;
}
inline void product_fence() {}
inline void product_commit() {
  emu::now->products.push_back(std::move(emu::now->open_products));
  emu::now->open_products.clear();
}
template <int PENDING>
void product_wait() {
  for (auto& its = emu::now->products; int(its.size()) > PENDING; its.pop_front())
    for (const emu::Product& each : its.front()) emu::finish(each);
}
template <int COUNT>
void keep_order(float (&)[COUNT]) {}

template <class Input, int N>
struct Product {
  static void add(float (&d)[N / 2], emu::u64 a, emu::u64 b, int add) {
    if (Input::bytes == 2 && Input::pack(1.0f) != 0x3C00) emu::fail("products of BF16");
    emu::add_product(d, N, a, b, add, Input::bytes == 1);
  }
};

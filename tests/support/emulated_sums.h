// Products of a warp's matrices and of warpgroups, for emulated_runtime.cpp: who comes last computes those of its whole
// warp, which waits.
#pragma once

#include "emulated_blocks.h"

#include <algorithm>

namespace emu {
static bool is_last(const void* own) {  // the others return when it has computed
  Warp& its = warp();
  its.given[lane()] = own;
  const int turn = its.all.turn;
  if (its.all.arrive(32)) return true;
  wait_while(&its.all.turn, turn);
  return false;
}
static float wide(bool is_half, u32 pair, int which) {
  const u16 x = u16(pair >> which * 16);
  return is_half ? from_half(x) : number(u32(x) << 16);
}
// Numbers of a left operand, 16 x 16, that a lane has in four registers.
static void spread(float (&a)[16][16], int lane, const u32* x, bool is_half) {
  for (int i = 0; i < 8; ++i) {
    a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = wide(is_half, x[i / 2], i % 2);
  }
}
struct Operands {
  float* d[4];
  u32 x[6];
};
void multiply(bool is_half, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Operands own = {{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}};
  if (!is_last(&own)) return;
  float a[16][16], b[16][8];
  const auto of = [](int lane) { return (const Operands*)warp().given[lane]; };
  for (int l = 0; l < 32; ++l) {
    spread(a, l, of(l)->x, is_half);
    for (int i = 0; i < 4; ++i) b[l % 4 * 2 + i % 2 + i / 2 * 8][l / 4] = wide(is_half, of(l)->x[4 + i / 2], i % 2);
  }
  for (int row = 0; row < 16; ++row) {
    const auto d = [&](int n) -> float& { return *of(row % 8 * 4 + n / 2)->d[n % 2 + row / 8 * 2]; };
    double sums[8];
    for (int n = 0; n < 8; ++n) sums[n] = d(n);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) sums[n] += double(a[row][k]) * b[k][n];
    for (int n = 0; n < 8; ++n) d(n) = float(sums[n]);
  }
}

void add_product(float* d, int columns, u64 a, u64 b, int add, bool is_e4m3) {
  own_fiber().open_products.push_back({d, {}, b, columns, add, a | u64(1) << 63, is_e4m3});
}
void add_product(float* d, int columns, const u32* a, u64 b, int add) {
  own_fiber().open_products.push_back({d, {a[0], a[1], a[2], a[3]}, b, columns, add, 0, false});
}
void commit_products() {
  own_fiber().products.push_back(std::move(own_fiber().open_products));
  own_fiber().open_products.clear();
}

constexpr int MOST = 256;  // columns
static u32 operand_start(u64 operand) { return u32(operand & 0x3FFF) << 4; }
static const u8* swizzled(u32 at, int bytes) {
  at ^= (at >> 7 & 7) << 4;
  if (at + bytes > now->own->size) fail("an operand outside of shared memory", at);
  return now->own->memory + at;
}
// Rows of a right operand have 128 bytes, atoms of eight are as far apart as it says. Of a transposed one, which says how
// far apart 64 of its rows are, lines of 128 bytes are numbers k.
static u32 place_in(u64 operand, int row, int k, int bytes) {
  const u32 far = u32(operand >> 32 & 0x3FFF) << 4, beside = u32(operand >> 16 & 0x3FFF) << 4;
  if (bytes == 2 && beside > 16) return row / 64 * beside + k / 8 * far + k % 8 * 128 + row % 64 * 2;
  return row / 8 * far + row % 8 * 128 + k * bytes;
}
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_ANY_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_ANY_CPU
#endif
// Of a row: sums of another order than a GPU's, the same for all that computes them here.
FOR_ANY_CPU void add_row(double* sums, const float* a, const double (*b)[MOST], int columns) {
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < columns; ++n) sums[n] += a[k] * b[k][n];
}
// Products of E4M3 numbers, 32 deep where those of 16 bits are 16 deep, as tensor cores add them (fp8_sums.py): all parts are
// cut towards zero to a unit that follows from the largest.
FOR_ANY_CPU void find_most(int* most, const int* a, const int (*b)[MOST], int columns) {
  for (int k = 0; k < 32; ++k)
    for (int n = 0; n < columns; ++n) most[n] = a[k] + b[k][n] > most[n] ? a[k] + b[k][n] : most[n];
}
FOR_ANY_CPU void add_cut(int* sums, const float* units, const float* a, const float (*b)[MOST], int columns) {
  for (int k = 0; k < 32; ++k)
    for (int n = 0; n < columns; ++n) sums[n] += int(a[k] * b[k][n] * units[n]);
}
constexpr int NONE = -1000;  // less than any exponent, as is what two zeros or a zero and a number add up to
static int exponent_of(u8 x) { return x & 127 ? std::max(x >> 3 & 15, 1) - 7 : 2 * NONE; }

static void finish_e4m3(const WarpProduct& its, const u32 (&left)[32][4]) {
  static float a[16][32], b[32][MOST];
  static int a_exponents[16][32], b_exponents[32][MOST];
  bool a_is_nan[16] = {}, b_is_nan[MOST] = {};
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 16; ++i) {
      const u8 x = u8(left[l][i / 4] >> i % 4 * 8);
      const int row = l / 4 + i / 4 % 2 * 8, k = l % 4 * 4 + i % 4 + i / 8 * 16;
      a[row][k] = from_half(half_of_e4m3(x)), a_exponents[row][k] = exponent_of(x);
      a_is_nan[row] |= (x & 127) == 127;
    }
  }
  for (int n = 0; n < its.columns; ++n) {
    for (int k = 0; k < 32; ++k) {
      const u8 x = *swizzled(operand_start(its.b) + place_in(its.b, n, k, 1), 1);
      b[k][n] = from_half(half_of_e4m3(x)), b_exponents[k][n] = exponent_of(x);
      b_is_nan[n] |= (x & 127) == 127;
    }
  }
  for (int row = 0; row < 16; ++row) {
    const auto d = [&](int n) -> float& {
      return ((const WarpProduct*)warp().given[row % 8 * 4 + n % 8 / 2])->d[n / 8 * 4 + row / 8 * 2 + n % 2];
    };
    int most[MOST], sums[MOST] = {};
    float units[MOST];
    for (int n = 0; n < its.columns; ++n) {
      most[n] = NONE;
      if (its.add && d(n) != 0) std::frexp(d(n), &most[n]), --most[n];
    }
    find_most(most, a_exponents[row], b_exponents, its.columns);
    for (int n = 0; n < its.columns; ++n) {  // where even this is no number of 32 bits, there is no product but 0
      if (most[n] == NONE) most[n] = 13;
      units[n] = number(std::min(std::max(127 + 13 - most[n], 1), 254) << 23);
    }
    add_cut(sums, units, a[row], b, its.columns);
    for (int n = 0; n < its.columns; ++n) {
      const float before = its.add ? d(n) : 0.0f;
      const double unit = std::ldexp(1.0, 13 - most[n]);
      const double all = double((long long)(before * unit)) + sums[n];
      const bool is_nan = before != before || a_is_nan[row] || b_is_nan[n];
      d(n) = is_nan ? NAN : number(bits(float(all / unit)) & ~1023u);
    }
  }
}
static void finish(const WarpProduct& its) {
  if (!is_last(&its)) return;
  u32 left[32][4];
  for (int l = 0; l < 32; ++l) {
    const WarpProduct& own = *(const WarpProduct*)warp().given[l];
    if (own.b != its.b || own.columns != its.columns || own.left != its.left || !own.add != !its.add) {
      fail("lanes of a warp have other operands");
    }
    for (int i = 0; i < 4; ++i) {
      const int row = now->thread.x / 32 % 4 * 16 + l / 4 + i % 2 * 8;
      const u32 at = operand_start(its.left) + row / 8 * 1024 + row % 8 * 128 + l % 4 * 4 + i / 2 * 16;
      if (its.left) std::memcpy(&left[l][i], swizzled(at, 4), 4);
      else left[l][i] = own.a[i];
    }
  }
  if (its.is_e4m3 || is_e4m3) return finish_e4m3(its, left);
  static float a[16][16];
  static double b[16][MOST];
  for (int l = 0; l < 32; ++l) spread(a, l, left[l], true);
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < its.columns; ++n) {
      u16 x;
      std::memcpy(&x, swizzled(operand_start(its.b) + place_in(its.b, n, k, 2), 2), 2);
      b[k][n] = from_half(x);
    }
  }
  for (int row = 0; row < 16; ++row) {
    const auto d = [&](int n) -> float& {
      return ((const WarpProduct*)warp().given[row % 8 * 4 + n % 8 / 2])->d[n / 8 * 4 + row / 8 * 2 + n % 2];
    };
    double sums[MOST];
    for (int n = 0; n < its.columns; ++n) sums[n] = its.add ? d(n) : 0.0f;
    add_row(sums, a[row], b, its.columns);
    for (int n = 0; n < its.columns; ++n) d(n) = float(sums[n]);
  }
}
void wait_for_products(int pending) {
  auto& products = own_fiber().products;
  for (; int(products.size()) > pending; products.pop_front())
    for (const WarpProduct& each : products.front()) finish(each);
}
}  // namespace emu

// Numbers of 8 and 16 bits as a GPU rounds them, and products of a warp's matrices.
#pragma once

#include "emulated_fibers.h"

namespace emu {
inline u32 bits(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
inline float number(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
inline u16 bf16(float x) {
  const u32 y = bits(x);
  if (x != x) return 0x7fff;
  return u16((y + 0x7fff + ((y >> 16) & 1)) >> 16);
}
inline float from_half(u16 h) {
  const int exponent = h >> 10 & 31, digits = h & 1023;
  const float y = exponent == 31 ? (digits ? NAN : INFINITY)
                                 : std::ldexp(float(exponent ? 1024 + digits : digits), std::max(exponent, 1) - 25);
  return h >> 15 ? -y : y;
}
inline u16 half(float x) {  // nearest even
  const u16 sign = std::signbit(x) << 15;
  if (x != x) return 0x7fff;
  const float size = std::fabs(x);
  if (size == 0 || size >= 65520.0f) return sign | (size ? 0x7c00 : 0);
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = std::max(exponent - 11, -24);
  const u32 n = u32(std::nearbyint(std::ldexp(size, -unit)));
  return sign | u16(n < 1024 && unit == -24 ? n : (unit + 24 << 10) + n);
}
inline u32 halves(float high, float low) { return half(low) | u32(half(high)) << 16; }
inline float within(float x) { return std::min(std::max(x, -65504.0f), 65504.0f); }
inline u16 half_of_e4m3(u8 x) {
  if ((x & 127) == 127) return 0x7fff;
  const int exponent = x >> 3 & 15, digits = x & 7;
  const float y = exponent ? std::ldexp(8.0f + digits, exponent - 10) : std::ldexp(float(digits), -9);
  return half(x >> 7 ? -y : y);
}
inline u8 e4m3(float x) {  // nearest even, saturated
  if (x != x) return 0x7f;
  const float size = std::min(std::fabs(x), 448.0f);
  int exponent = 0;
  std::frexp(size, &exponent);
  const int power = size > 0 ? std::max(exponent - 1, -6) : -6;
  return (std::signbit(x) ? 0x80 : 0) | u8((power + 6 << 3) + u32(std::nearbyint(std::ldexp(size, 3 - power))));
}
inline u32 wide_pair(u32 x) { return half_of_e4m3(x & 255) | u32(half_of_e4m3(x >> 8 & 255)) << 16; }

inline u32 transposed(u32 x) {
  std::memcpy(warp().shown[lane()], &x, 4);
  sync_warp();
  u16 found[2];
  for (int k = 0; k < 2; ++k) {
    const int row = lane() % 4 * 2 + k, column = lane() / 4;
    found[k] = ((const u16*)warp().shown[4 * row + column / 2])[column % 2];
  }
  sync_warp();
  return found[0] | u32(found[1]) << 16;
}
// d += a[16 x 16] b[16 x 8]; sums of another order than a GPU's, the same for all that computes them here.
inline void multiply(const char* types, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                     u32 b0, u32 b1) {
  const bool is_half = types[0] == 'f';
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  float wide[12];
  for (int i = 0; i < 12; ++i) {
    const u16 x = u16(own[i / 2] >> i % 2 * 16);
    wide[i] = is_half ? from_half(x) : number(u32(x) << 16);
  }
  std::memcpy(warp().shown[lane()], wide, 48);
  sync_warp();
  float* d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
    double sum = *d[i];
    for (int k = 0; k < 16; ++k) {
      const float* a = (const float*)warp().shown[4 * row + k % 8 / 2];
      const float* b = (const float*)warp().shown[4 * column + k % 8 / 2];
      sum += double(a[2 * (i / 2 + k / 8 * 2) + k % 2]) * b[8 + k / 8 * 2 + k % 2];
    }
    *d[i] = float(sum);
  }
  sync_warp();
}
}  // namespace emu

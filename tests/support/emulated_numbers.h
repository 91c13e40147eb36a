// Numbers of 8 and 16 bits as a GPU rounds them: to nearest even, FP8 saturated.
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
  const u32 sign = u32(h & 0x8000) << 16, size = h & 0x7fff;
  if (size < 0x400) return number(sign | bits(float(size) * 0x1p-24f));
  if (size > 0x7c00) return NAN;
  return number(sign | (size == 0x7c00 ? 0x7f800000 : (size << 13) + (112 << 23)));
}
// Where a number is a multiple of a power of two less than 2^23 apart, a sum with that one rounds it.
inline u16 half(float x) {
  const u32 sign = bits(x) >> 16 & 0x8000, size = bits(x) & 0x7fffffff;
  if (x != x) return 0x7fff;
  if (size >= bits(65520.0f)) return u16(sign | 0x7c00);
  if (size < bits(0x1p-14f)) return u16(sign | (bits(number(size) + 0.5f) - bits(0.5f)));
  return u16(sign | (size - (112 << 23) + 0xfff + (size >> 13 & 1) >> 13));
}
inline u32 halves(float high, float low) { return half(low) | u32(half(high)) << 16; }
inline float within(float x) { return std::min(std::max(x, -65504.0f), 65504.0f); }
inline u16 half_of_e4m3(u8 x) {
  if ((x & 127) == 127) return 0x7fff;
  const u32 sign = u32(x & 128) << 8, size = x & 127;
  return u16(sign | (size < 8 ? half(float(size) * 0x1p-9f) : (size << 7) + (8 << 10)));
}
inline u8 e4m3(float x) {
  if (x != x) return 0x7f;
  const u32 sign = bits(x) >> 24 & 0x80, size = min(bits(x) & 0x7fffffff, bits(448.0f));
  if (size < bits(0x1p-6f)) return u8(sign | (bits(number(size) + 0x1p14f) - bits(0x1p14f)));
  return u8(sign | (size - (120 << 23) + 0x7ffff + (size >> 20 & 1) >> 20));
}
inline u32 wide_pair(u32 x) { return half_of_e4m3(x & 255) | u32(half_of_e4m3(x >> 8 & 255)) << 16; }
}  // namespace emu

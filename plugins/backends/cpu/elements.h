// Element types: load 16 values as floats, store 16 floats, round floats to the type.
//
// Rounding is to nearest even, as torch rounds. FP8 E4M3 becomes half precision by a shift (value *
// 2^-8, the exponent biases are 7 and 15), exact for subnormals too; `F8::load` also multiplies by
// 256 and restores NaN, `F8Weight::load` leaves both to its caller.
#pragma once

#include "vec.h"

namespace llmctl {
namespace LLMCTL_ISA {

static inline float half_to_float(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu;
  float r = bits_float(magnitude << 13) * bits_float(0x77800000u);  // * 2^112 moves the bias
  if (magnitude >= 0x7c00u) r = bits_float((magnitude << 13) | 0x7f800000u);
  return bits_float(float_bits(r) | (uint32_t(h & 0x8000u) << 16));
}
static inline uint16_t float_to_half(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u, magnitude = float_bits(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves units of 2^-24
    const float moved = bits_float(magnitude) + 0.5f;
    return uint16_t(sign | (float_bits(moved) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

struct F32 {
  using Element = float;
  static inline V load(const float* p) { return LLMCTL_ISA::load(p); }
  static inline void store(float* p, V a) { LLMCTL_ISA::store(p, a); }
  static inline V round(V a) { return a; }
};

struct BF16 {
  using Element = uint16_t;
  static inline V load(const uint16_t* p) {
    V r;
#if defined(__AVX512F__)
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    r.part[0] = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
    LLMCTL_EACH_PART {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i));
      r.part[i] = (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
    }
#else
    LLMCTL_EACH_PART {
      Uints wide;
      for (int j = 0; j < kWidth; ++j) wide[j] = uint32_t(p[i * kWidth + j]) << 16;
      r.part[i] = (Floats)wide;
    }
#endif
    return r;
  }
  // Nearest even, in the upper half of each lane; NaN stays NaN.
  static inline V round(V a) {
    LLMCTL_EACH_PART {
      const Uints raw = (Uints)a.part[i];
      const Uints rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) & 0xffff0000u;
      const Ints is_nan = a.part[i] != a.part[i];
      a.part[i] = (Floats)(((Ints)rounded & ~is_nan) | (is_nan & 0x7fc00000));
    }
    return a;
  }
  static inline void store(uint16_t* p, V a) {
    a = round(a);
#if defined(__AVX512F__)
    const __m512i wide = _mm512_srli_epi32((__m512i)a.part[0], 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(wide));
#else
    LLMCTL_EACH_PART {
      const Uints wide = (Uints)a.part[i] >> 16;
      for (int j = 0; j < kWidth; ++j) p[i * kWidth + j] = static_cast<uint16_t>(wide[j]);
    }
#endif
  }
};

struct F16 {
  using Element = uint16_t;
  static inline V load(const uint16_t* p) {
    V r;
#if defined(__AVX512F__)
    r.part[0] = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    LLMCTL_EACH_PART r.part[i] = (Floats)_mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i)));
#else
    LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) r.part[i][j] =
        half_to_float(p[i * kWidth + j]);
#endif
    return r;
  }
  static inline void store(uint16_t* p, V a) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    LLMCTL_EACH_PART _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p + 8 * i),
        _mm256_cvtps_ph((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT));
#else
    LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) p[i * kWidth + j] =
        float_to_half(a.part[i][j]);
#endif
  }
  static inline V round(V a) {
    uint16_t lanes[kLanes];
    store(lanes, a);
    return load(lanes);
  }
};

// FP8 E4M3 weights: values * 2^-8, and NaN (which no checked weight holds) reads as 480 * 2^-8.
struct F8Weight {
  using Element = uint8_t;
  static constexpr float kUnit = 256.0f;
  static inline V load(const uint8_t* p) {
    V r;
#if defined(__AVX512F__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    r.part[0] =
        (Floats)_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
    LLMCTL_EACH_PART {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
      const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7);
      r.part[i] = (Floats)_mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16((short)0xbfff)));
    }
#else
    LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) {
      const uint32_t b = p[i * kWidth + j];
      r.part[i][j] = half_to_float(uint16_t((b & 0x80u) << 8 | (b & 0x7fu) << 7));
    }
#endif
    return r;
  }
};

struct F8 {
  using Element = uint8_t;
  static inline V load(const uint8_t* p) {
    V r = F8Weight::load(p) * set(F8Weight::kUnit);
    LLMCTL_EACH_PART {
      const Ints is_nan = ((Ints)r.part[i] & 0x7fffffff) == 0x43f00000;  // 480 is not E4M3
      r.part[i] = (Floats)((Ints)r.part[i] | (is_nan & 0x7fc00000));
    }
    return r;
  }
  // Nearest even, saturating at 448; NaN gives 0x7f.
  static inline void store(uint8_t* p, V a) {
    a = clamp(a, -kF8Max, kF8Max);
    V moved = abs(a) + set(16384.0f);  // leaves units of 2^-9 in the low bits
    LLMCTL_EACH_PART {
      const Ints raw = (Ints)a.part[i], magnitude = raw & 0x7fffffff;
      const Ints normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
      const Ints subnormal = (Ints)moved.part[i] - 0x46800000;
      const Ints is_normal = magnitude >= 0x3c800000;  // 2^-6
      const Ints is_nan = magnitude > 0x7f800000;
      Ints byte = (normal & is_normal) | (subnormal & ~is_normal);
      byte = ((byte & ~is_nan) | (is_nan & 0x7f)) | ((raw >> 24) & 0x80);
#if defined(__AVX512F__)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)byte));
#else
      for (int j = 0; j < kWidth; ++j) p[i * kWidth + j] = static_cast<uint8_t>(byte[j]);
#endif
    }
  }
};

// INT8 of cached keys and values: -127 to 127, whole numbers.
struct I8 {
  using Element = int8_t;
  static inline V load(const int8_t* p) {
    V r;
#if defined(__AVX512F__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    r.part[0] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
#elif defined(__AVX2__)
    LLMCTL_EACH_PART {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
      r.part[i] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
    }
#else
    LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) r.part[i][j] = p[i * kWidth + j];
#endif
    return r;
  }
  // Nearest even, saturating; NaN gives 0.
  static inline void store(int8_t* p, V a) {
    a = clamp(a, -kI8Max, kI8Max);
    const V moved = a + set(12582912.0f);  // 1.5 * 2^23: leaves units in the low bits
    LLMCTL_EACH_PART {
      const Ints is_number = a.part[i] == a.part[i];
      const Ints whole = ((Ints)moved.part[i] - 0x4b400000) & is_number;
      for (int j = 0; j < kWidth; ++j) p[i * kWidth + j] = static_cast<int8_t>(whole[j]);
    }
  }
};

// The first `count` (1 to 16) elements; lanes beyond are 0.
template <class T>
static inline V load_some(const typename T::Element* p, int64_t count) {
  if (count >= kLanes) return T::load(p);
  typename T::Element lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(lanes[0]));
  return T::load(lanes);
}
template <class T>
static inline void store_some(typename T::Element* p, V a, int64_t count) {
  if (count >= kLanes) {
    T::store(p, a);
    return;
  }
  typename T::Element lanes[kLanes];
  T::store(lanes, a);
  std::memcpy(p, lanes, count * sizeof(lanes[0]));
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

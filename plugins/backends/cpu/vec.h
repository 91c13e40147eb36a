// A vector of 16 floats that behaves the same on every instruction set.
//
// V is one, two or four registers, and every operation is one IEEE operation per lane in a fixed
// order, so the AVX2 and AVX-512 variants give the same bits. Multiply-add is fused wherever the
// hardware has it; only on CPUs without it (the generic variant on old x86) do bits differ.
// Reductions use one tree: lanes i and i+8, then i+4, i+2, i+1.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace llmctl {
namespace LLMCTL_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kWidth;
constexpr float kF8Max = 448.0f;
constexpr float kI8Max = 127.0f;  // symmetric, as calibration takes it

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Uints __attribute__((vector_size(kWidth * 4)));
typedef float LooseFloats __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

struct V {
  Floats part[kParts];
};

#define LLMCTL_EACH_PART for (int i = 0; i < kParts; ++i)

static inline V load(const float* p) {
  V r;
  LLMCTL_EACH_PART r.part[i] = *reinterpret_cast<const LooseFloats*>(p + i * kWidth);
  return r;
}
static inline void store(float* p, V a) {
  LLMCTL_EACH_PART *reinterpret_cast<LooseFloats*>(p + i * kWidth) = a.part[i];
}
static inline V set(float x) {
  V r;
  LLMCTL_EACH_PART r.part[i] = x - Floats{};
  return r;
}
static inline V operator+(V a, V b) {
  LLMCTL_EACH_PART a.part[i] += b.part[i];
  return a;
}
static inline V operator-(V a, V b) {
  LLMCTL_EACH_PART a.part[i] -= b.part[i];
  return a;
}
static inline V operator*(V a, V b) {
  LLMCTL_EACH_PART a.part[i] *= b.part[i];
  return a;
}
static inline V operator/(V a, V b) {
  LLMCTL_EACH_PART a.part[i] /= b.part[i];
  return a;
}
// a * b + c
static inline V fma(V a, V b, V c) {
  V r;
#if defined(__AVX512F__)
  r.part[0] = (Floats)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
  LLMCTL_EACH_PART r.part[i] =
      (Floats)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) r.part[i][j] =
      __builtin_fmaf(a.part[i][j], b.part[i][j], c.part[i][j]);
#else
  LLMCTL_EACH_PART r.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  return r;
}
// a > b ? a : b in every lane; a NaN in either gives b
static inline V max(V a, V b) {
  V r;
#if defined(__AVX512F__)
  r.part[0] = (Floats)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
  LLMCTL_EACH_PART r.part[i] = (Floats)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]);
#else
  LLMCTL_EACH_PART r.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
#endif
  return r;
}
// a < b ? a : b in every lane; a NaN in either gives b
static inline V min(V a, V b) {
  V r;
#if defined(__AVX512F__)
  r.part[0] = (Floats)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0]);
#elif defined(__AVX2__)
  LLMCTL_EACH_PART r.part[i] = (Floats)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]);
#else
  LLMCTL_EACH_PART r.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
#endif
  return r;
}
static inline V abs(V a) {
  LLMCTL_EACH_PART a.part[i] = (Floats)((Ints)a.part[i] & 0x7fffffff);
  return a;
}
static inline V clamp(V a, float low, float high) { return min(set(high), max(set(low), a)); }

static inline float sum(V a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 whole = (__m512)a.part[0];
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  const __m256 s8 = _mm256_add_ps((__m256)a.part[0], (__m256)a.part[1]);
#endif
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}
// The sums of four vectors, by the same tree.
static inline void sum_four(V a, V b, V c, V d, float* out) {
#if defined(__AVX512F__)
  const auto both = [](__m512 low, __m512 high) { return _mm512_add_ps(low, high); };
  const __m512 va = (__m512)a.part[0], vb = (__m512)b.part[0];
  const __m512 vc = (__m512)c.part[0], vd = (__m512)d.part[0];
  const __m512 ab = both(_mm512_shuffle_f32x4(va, vb, 0x44), _mm512_shuffle_f32x4(va, vb, 0xee));
  const __m512 cd = both(_mm512_shuffle_f32x4(vc, vd, 0x44), _mm512_shuffle_f32x4(vc, vd, 0xee));
  __m512 s = both(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  s = both(s, _mm512_permute_ps(s, 0x4e));
  s = both(s, _mm512_permute_ps(s, 0xb1));
  const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
#else
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
#endif
}
// The largest lane, by the same tree.
static inline float largest(V a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 whole = (__m512)a.part[0];
  const __m256 m8 = _mm256_max_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  const __m256 m8 = _mm256_max_ps((__m256)a.part[0], (__m256)a.part[1]);
#endif
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_shuffle_ps(m2, m2, 1)));
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
#endif
}
static inline float square_root(float x) { return __builtin_sqrtf(x); }

static inline float bits_float(uint32_t x) {
  float r;
  std::memcpy(&r, &x, 4);
  return r;
}
static inline uint32_t float_bits(float x) {
  uint32_t r;
  std::memcpy(&r, &x, 4);
  return r;
}

// Lanes [begin, end) of a, other lanes of b.
static inline V select_range(int begin, int end, V a, V b) {
  float lane[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const V index = load(lane);
  LLMCTL_EACH_PART {
    const Ints inside = (index.part[i] >= static_cast<float>(begin)) &
                        (index.part[i] < static_cast<float>(end));
    a.part[i] = (Floats)(((Ints)a.part[i] & inside) | ((Ints)b.part[i] & ~inside));
  }
  return a;
}

// e^x: range reduction by ln 2 in two parts and the minimax polynomial of Cephes' expf, within
// 2 ulp of the exact value (a test measures it); exp(0) == 1, exp(-inf) == 0, NaN stays.
static inline V exponential(V x) {
  x = min(set(89.0f), max(set(-105.0f), x));
  const V magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = fma(x, set(1.44269504088896341f), magic);
  const V n = shifted - magic;
  V r = fma(n, set(-0.693145751953125f), x);  // ln 2, high part: 16 bits, so n * high is exact
  r = fma(n, set(-1.42860682030941723212e-6f), r);
  V p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, r * r, r);
  p = p + set(1.0f);
  // 2^n in two factors, so that results reach down to subnormals and up to infinity
  LLMCTL_EACH_PART {
    const Ints whole = (Ints)shifted.part[i] - 0x4b400000;
    const Ints half = whole >> 1;
    p.part[i] *= (Floats)((half + 127) << 23);
    p.part[i] *= (Floats)((whole - half + 127) << 23);
  }
  return p;
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

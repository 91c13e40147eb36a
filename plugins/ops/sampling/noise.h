// exp and log in double, and Philox4x32-10: the arithmetic that decides a drawn token.
//
// Every operation is one IEEE operation in a fixed order and none is fused, so all instruction
// sets, with fused multiply-add or without, give the same bits. exp and log are within 1 ulp
// (tests/plugins/backends/test_cpu_sampling.py measures them). Loops over exp_score vectorize.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../backends/cpu/vec.h"

namespace llmctl {
namespace LLMCTL_ISA {

constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits, so n * high is exact
constexpr double kLn2Low = 1.90821492927058770002e-10;

static inline uint64_t double_bits(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}
static inline double bits_double(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// e^x for x <= 0; 0 below -708, where e^x leaves the normal numbers. Taylor series to r^13 on
// |r| <= ln(2) / 2, where the next term is 4e-18.
static inline double exp_score(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double bounded = x < -708.0 ? -708.0 : x;
  const double shifted = bounded * 1.44269504088896340736 + magic;
  const double n = shifted - magic;
  const double r = (bounded - n * kLn2High) - n * kLn2Low;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  const double value = 1.0 + (r + r * r * p);
  const double scaled = value * bits_double((double_bits(shifted) + 1023) << 52);
  return x < -708.0 ? 0.0 : scaled;
}

// log x for x >= 0. With m in [sqrt(1/2), sqrt(2)), f = m - 1 and s = f / (2 + f), log m is
// 2 artanh(s) = 2s + s * rest, and 2s = f - f^2/2 + s * f^2/2 keeps the leading term exact.
static inline double log_of(double x) {
  if (x == 0.0) return -__builtin_inf();
  int64_t exponent = 0;
  if (x < 2.2250738585072014e-308) {
    x *= 18014398509481984.0;  // 2^54: subnormals become normal
    exponent = -54;
  }
  const uint64_t bits = double_bits(x);
  const int64_t offset = static_cast<int64_t>(bits - 0x3fe6a09e667f3bcdull);  // sqrt(1/2)
  exponent += offset >> 52;
  const double f =
      bits_double(bits - (static_cast<uint64_t>(offset) & 0xfff0000000000000ull)) - 1.0;
  const double s = f / (2.0 + f), z = s * s;
  double rest = 2.0 / 23.0;
  rest = rest * z + 2.0 / 21.0;
  rest = rest * z + 2.0 / 19.0;
  rest = rest * z + 2.0 / 17.0;
  rest = rest * z + 2.0 / 15.0;
  rest = rest * z + 2.0 / 13.0;
  rest = rest * z + 2.0 / 11.0;
  rest = rest * z + 2.0 / 9.0;
  rest = rest * z + 2.0 / 7.0;
  rest = rest * z + 2.0 / 5.0;
  rest = rest * z + 2.0 / 3.0;
  rest = rest * z;
  const double half = 0.5 * f * f, n = static_cast<double>(exponent);
  return n * kLn2High - ((half - (s * (half + rest) + n * kLn2Low)) - f);
}

// Which noise: see plugins/ops/sampling/spec.py.
struct NoiseKey {
  uint32_t low, high;  // of the seed
  uint32_t position, stream;
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;

// Counters of several Philox blocks, one 32-bit word in the low half of each 64-bit lane. High
// halves are undefined: products ignore them.
#if defined(__AVX512F__)
typedef __m512i Wide;
constexpr int kWideLanes = 8;
static inline Wide wide_load(const uint32_t* p) {
  return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline Wide wide_set(uint32_t x) { return _mm512_set1_epi64(x); }
static inline Wide wide_multiply(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
static inline Wide wide_high(Wide a) { return _mm512_srli_epi64(a, 32); }
static inline Wide wide_xor(Wide a, Wide b) { return _mm512_xor_si512(a, b); }
// Low halves of a, low halves of b above them.
static inline void wide_store_pair(uint64_t* p, Wide a, Wide b) {
  _mm512_storeu_si512(p, _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32)));
}
#elif defined(__AVX2__)
typedef __m256i Wide;
constexpr int kWideLanes = 4;
static inline Wide wide_load(const uint32_t* p) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Wide wide_set(uint32_t x) { return _mm256_set1_epi64x(x); }
static inline Wide wide_multiply(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
static inline Wide wide_high(Wide a) { return _mm256_srli_epi64(a, 32); }
static inline Wide wide_xor(Wide a, Wide b) { return _mm256_xor_si256(a, b); }
static inline void wide_store_pair(uint64_t* p, Wide a, Wide b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa));
}
#else
struct Wide {
  uint64_t lane[2];
};
constexpr int kWideLanes = 2;
static inline Wide wide_load(const uint32_t* p) { return {{p[0], p[1]}}; }
static inline Wide wide_set(uint32_t x) { return {{x, x}}; }
static inline Wide wide_multiply(Wide a, Wide b) {
  return {{(a.lane[0] & 0xffffffff) * (b.lane[0] & 0xffffffff),
           (a.lane[1] & 0xffffffff) * (b.lane[1] & 0xffffffff)}};
}
static inline Wide wide_high(Wide a) { return {{a.lane[0] >> 32, a.lane[1] >> 32}}; }
static inline Wide wide_xor(Wide a, Wide b) {
  return {{a.lane[0] ^ b.lane[0], a.lane[1] ^ b.lane[1]}};
}
static inline void wide_store_pair(uint64_t* p, Wide a, Wide b) {
  for (int i = 0; i < 2; ++i) p[i] = (a.lane[i] & 0xffffffff) | (b.lane[i] << 32);
}
#endif

constexpr int kNoiseBlocks = 32;               // Philox blocks at a time
constexpr int kNoiseIds = 4 * kNoiseBlocks;  // and the ids whose words they hold

// words[4 * i + j] = word j of block blocks[i].
static inline void philox(const uint32_t* blocks, NoiseKey key, uint32_t* words) {
  uint64_t low[kNoiseBlocks], high[kNoiseBlocks];  // words 0 and 1, words 2 and 3
  const Wide m0 = wide_set(kPhiloxM0), m1 = wide_set(kPhiloxM1);
  for (int i = 0; i < kNoiseBlocks; i += kWideLanes) {
    Wide c0 = wide_load(blocks + i), c1 = wide_set(key.position);
    Wide c2 = wide_set(key.stream), c3 = wide_set(0);
    uint32_t k0 = key.low, k1 = key.high;
    for (int round = 0; round < 10; ++round) {
      const Wide p0 = wide_multiply(c0, m0), p1 = wide_multiply(c2, m1);
      c0 = wide_xor(wide_high(p1), wide_xor(c1, wide_set(k0)));
      c2 = wide_xor(wide_high(p0), wide_xor(c3, wide_set(k1)));
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    wide_store_pair(low + i, c0, c1);
    wide_store_pair(high + i, c2, c3);
  }
  for (int i = 0; i < kNoiseBlocks; ++i) {
    words[4 * i] = static_cast<uint32_t>(low[i]);
    words[4 * i + 1] = static_cast<uint32_t>(low[i] >> 32);
    words[4 * i + 2] = static_cast<uint32_t>(high[i]);
    words[4 * i + 3] = static_cast<uint32_t>(high[i] >> 32);
  }
}

// The word of one id.
static inline uint32_t philox_word(int64_t id, NoiseKey key) {
  uint32_t c[4] = {static_cast<uint32_t>(id >> 2), key.position, key.stream, 0};
  uint32_t k0 = key.low, k1 = key.high;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c[0]) * kPhiloxM0;
    const uint64_t p1 = static_cast<uint64_t>(c[2]) * kPhiloxM1;
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c[id & 3];
}

static inline double uniform_of(uint32_t word) { return (word + 0.5) * 0x1p-32; }
static inline double noise_of(uint32_t word) { return -log_of(-log_of(uniform_of(word))); }

}  // namespace LLMCTL_ISA
}  // namespace llmctl

// The innermost products: a few weight rows against a few tokens, every chain in a register.
#pragma once

#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 4, kTileTokens = 6;  // 24 accumulators of 32 registers
constexpr int kFewRows = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 2, kTileTokens = 3;  // 6 accumulators, 12 of 16 registers
constexpr int kFewRows = 2;
#else
constexpr int kTileRows = 2, kTileTokens = 2;
constexpr int kFewRows = 2;
#endif
constexpr int kTilesAhead = 2;  // that are prefetched: what memory delivers while a tile waits for it
constexpr int kBlockRows = 32;  // weight rows of one item, and the stride of its sums

// The activations of one chunk of tokens, as float32 rows of `stride`.
struct Rows {
  const float* data;
  int64_t stride;
};

template <class T>
void widen_row(const typename T::Element* from, int64_t count, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(to + k, T::load(from + k));
  if (k < count) store(to + k, load_some<T>(from + k, count - k));
}

// One step of ROWS * TOKENS chains.
template <class W, int ROWS, int TOKENS>
inline void multiply_step(const typename W::Element* weight, int64_t stride, Rows x,
                          V (&total)[ROWS][TOKENS]) {
  V value[TOKENS];
  for (int t = 0; t < TOKENS; ++t) value[t] = load(x.data + t * x.stride);
  for (int r = 0; r < ROWS; ++r) {
    const V w = W::load(weight + r * stride);
    for (int t = 0; t < TOKENS; ++t) total[r][t] = fma(w, value[t], total[r][t]);
  }
}

// Ends ROWS * TOKENS chains; sums [TOKENS][kBlockRows]. Inlined, as chains would go through memory.
template <int ROWS, int TOKENS>
__attribute__((always_inline)) inline void write_sums(const V (&total)[ROWS][TOKENS], float* sums) {
  for (int t = 0; t < TOKENS; ++t) {
    if constexpr (ROWS == 4) {
      sum_four(total[0][t], total[1][t], total[2][t], total[3][t], sums + t * kBlockRows);
    } else {
      for (int r = 0; r < ROWS; ++r) sums[t * kBlockRows + r] = sum(total[r][t]);
    }
  }
}

// ROWS weight rows, `stride` elements apart, against TOKENS activation rows over `inner` of K,
// weights widened as they are loaded.
template <class W, int ROWS, int TOKENS>
void stream_tile(const typename W::Element* weight, int64_t stride, int64_t inner, Rows x,
                 float* sums) {
  V total[ROWS][TOKENS];
  for (int r = 0; r < ROWS; ++r) {
    for (int t = 0; t < TOKENS; ++t) total[r][t] = set(0.0f);
  }
  // One cache line of each weight row at a time; the rows of a later tile are prefetched.
  constexpr int kLineSteps = 64 / (kLanes * sizeof(typename W::Element));
  int64_t k = 0;
  for (; k + kLineSteps * kLanes <= inner; k += kLineSteps * kLanes) {
    const auto* later = weight + kTilesAhead * ROWS * stride + k;
    for (int r = 0; r < ROWS; ++r) __builtin_prefetch(later + r * stride, 0, 3);
    for (int step = 0; step < kLineSteps; ++step) {
      multiply_step<W, ROWS, TOKENS>(weight + k + step * kLanes, stride,
                                     Rows{x.data + k + step * kLanes, x.stride}, total);
    }
  }
  for (; k + kLanes <= inner; k += kLanes) {
    multiply_step<W, ROWS, TOKENS>(weight + k, stride, Rows{x.data + k, x.stride}, total);
  }
  if (k < inner) {
    for (int r = 0; r < ROWS; ++r) {
      const V w = load_some<W>(weight + r * stride + k, inner - k);
      for (int t = 0; t < TOKENS; ++t) {
        total[r][t] = fma(w, load(x.data + t * x.stride + k), total[r][t]);
      }
    }
  }
  write_sums(total, sums);
}

template <class W, int ROWS>
void stream_rows(const typename W::Element* weight, int64_t stride, int64_t inner, Rows x,
                 int tokens, float* sums) {
  switch (tokens) {
    case 1: return stream_tile<W, ROWS, 1>(weight, stride, inner, x, sums);
    case 2: return stream_tile<W, ROWS, 2>(weight, stride, inner, x, sums);
    case 3: return stream_tile<W, ROWS, 3>(weight, stride, inner, x, sums);
#if defined(__AVX512F__)
    case 4: return stream_tile<W, ROWS, 4>(weight, stride, inner, x, sums);
    case 5: return stream_tile<W, ROWS, 5>(weight, stride, inner, x, sums);
    default: return stream_tile<W, ROWS, 6>(weight, stride, inner, x, sums);
#endif
  }
}

// One tile of widened weights [kTileRows][stride] against TOKENS tokens for `steps` vectors.
// Chains continue from and return to `parked`, unless this is the first or the last part of K.
template <int TOKENS>
void widened_tile(const float* weight, int64_t weight_stride, Rows x, int64_t steps, bool is_first,
                  bool is_last, float* parked, float* sums) {
  V total[kTileRows][TOKENS];
  for (int r = 0; r < kTileRows; ++r) {
    for (int t = 0; t < TOKENS; ++t) {
      total[r][t] = is_first ? set(0.0f) : load(parked + (t * kBlockRows + r) * kLanes);
    }
  }
  const float* rows[TOKENS];
  for (int t = 0; t < TOKENS; ++t) rows[t] = x.data + t * x.stride;
  for (int64_t k = 0; k < steps * kLanes; k += kLanes) {
    V w[kTileRows];
    for (int r = 0; r < kTileRows; ++r) w[r] = load(weight + r * weight_stride + k);
    for (int t = 0; t < TOKENS; ++t) {
      const V value = load(rows[t] + k);
      for (int r = 0; r < kTileRows; ++r) total[r][t] = fma(w[r], value, total[r][t]);
    }
  }
  if (is_last) {
    write_sums(total, sums);
    return;
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int t = 0; t < TOKENS; ++t) store(parked + (t * kBlockRows + r) * kLanes, total[r][t]);
  }
}

void widened_tokens(int tokens, const float* weight, int64_t weight_stride, Rows x, int64_t steps,
                    bool is_first, bool is_last, float* parked, float* sums) {
#define LLMCTL_TILE(COUNT)                                                                       \
  case COUNT:                                                                                    \
    return widened_tile<COUNT>(weight, weight_stride, x, steps, is_first, is_last, parked, sums)
  switch (tokens) {
    LLMCTL_TILE(1);
    LLMCTL_TILE(2);
#if defined(__AVX2__)
    LLMCTL_TILE(3);
#endif
#if defined(__AVX512F__)
    LLMCTL_TILE(4);
    LLMCTL_TILE(5);
    LLMCTL_TILE(6);
#endif
    default: return;
  }
#undef LLMCTL_TILE
}

}  // namespace
}  // namespace LLMCTL_ISA
}  // namespace llmctl

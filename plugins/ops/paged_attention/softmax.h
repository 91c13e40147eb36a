// Rows of queries against one tile: scores, online softmax, weighted values.
#pragma once

#include "tile.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

// One row: a query head at a position, and its running softmax.
struct Row {
  int64_t position;
  float top, total;
};

// scores [ROWS][kTileKeys] of ROWS queries [padded] against a tile of keys.
template <int ROWS>
inline void score_rows(const float* queries, int64_t padded, const float* keys, int64_t size,
                       float scale, float* scores) {
  V even[ROWS][2], odd[ROWS][2];
  for (int r = 0; r < ROWS; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = set(0.0f);
  for (int64_t d = 0; d < size; d += 2) {
    const float* at = keys + d * kTileKeys;
    const V k00 = load(at), k01 = load(at + kLanes);
    const V k10 = load(at + kTileKeys), k11 = load(at + kTileKeys + kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const V q0 = set(queries[r * padded + d]), q1 = set(queries[r * padded + d + 1]);
      even[r][0] = fma(q0, k00, even[r][0]);
      even[r][1] = fma(q0, k01, even[r][1]);
      odd[r][0] = fma(q1, k10, odd[r][0]);
      odd[r][1] = fma(q1, k11, odd[r][1]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    store(scores + r * kTileKeys, (even[r][0] + odd[r][0]) * set(scale));
    store(scores + r * kTileKeys + kLanes, (even[r][1] + odd[r][1]) * set(scale));
  }
}

// Turns a row's scores into weights, keys [low, high) of the tile being visible. Returns the
// factor for what the row has accumulated.
inline float soften(Row& row, float* scores, int64_t low, int64_t high) {
  const V hidden = set(-__builtin_inff());
  const int begin = static_cast<int>(low), end = static_cast<int>(high);
  const V a = select_range(begin, end, load(scores), hidden);
  const V b = select_range(begin - kLanes, end - kLanes, load(scores + kLanes), hidden);
  const float most = largest(max(a, b));
  const float top = most > row.top ? most : row.top;
  const V shift = set(top);
  const V pa = exponential(a - shift), pb = exponential(b - shift);
  store(scores, pa);
  store(scores + kLanes, pb);
  float factor = 1.0f;  // e^0, exactly
  if (top != row.top) {
    float lanes[kLanes];
    store(lanes, exponential(set(row.top - top)));
    factor = lanes[0];
  }
  row.total = row.total * factor + sum(pa + pb);
  row.top = top;
  return factor;
}

// outputs [ROWS][padded] += weights [ROWS][kTileKeys] * values, over the first `count` keys.
template <int ROWS, int PARTS>
inline void add_values(const float* weights, const float* values, int64_t padded, int64_t count,
                       const float* factors, float* outputs) {
  V total[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) {
      total[r][p] = load(outputs + r * padded + p * kLanes) * set(factors[r]);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    V value[PARTS];
    for (int p = 0; p < PARTS; ++p) value[p] = load(values + j * padded + p * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const V weight = set(weights[r * kTileKeys + j]);
      for (int p = 0; p < PARTS; ++p) total[r][p] = fma(weight, value[p], total[r][p]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) store(outputs + r * padded + p * kLanes, total[r][p]);
  }
}

template <int ROWS>
inline void add_all_values(const float* weights, const float* values, int64_t padded,
                           int64_t count, const float* factors, float* outputs) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes) {
    add_values<ROWS, 4>(weights, values + d, padded, count, factors, outputs + d);
  }
  for (; d < padded; d += kLanes) {
    add_values<ROWS, 1>(weights, values + d, padded, count, factors, outputs + d);
  }
}

}  // namespace
}  // namespace LLMCTL_ISA
}  // namespace llmctl

// The likeliest tokens of rows of logits, the largest first and of equal ones the smaller id, with
// their log-probabilities over the whole row. NaN counts as the least likely.
#include <cmath>

#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// Vectors whose largest lane is taken together: most hold nothing new.
constexpr int64_t kTopVectors = 4;

static inline V load_logits(const float* row, int64_t left) {
  const V lowest = set(-__builtin_inff());
  V value = lowest;
  if (left >= kLanes) {
    value = load(row);
  } else if (left > 0) {
    value = select_range(0, static_cast<int>(left), load_some<F32>(row, left), lowest);
  }
  return max(value, lowest);  // of a NaN the lowest
}

// The `count` largest so far are in order; an equal one that comes later stays behind.
static inline void insert_top(float value, int32_t id, int64_t count, int64_t* filled, float* values,
                              int32_t* ids) {
  int64_t at = *filled < count ? (*filled)++ : count - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = value;
  ids[at] = id;
}

static void top_row(const float* row, int64_t vocab, int64_t count, int32_t* ids, float* values) {
  int64_t filled = 0;
  for (int64_t i = 0; i < vocab; i += kTopVectors * kLanes) {
    V most = load_logits(row + i, vocab - i);
    for (int64_t j = 1; j < kTopVectors; ++j) {
      most = max(load_logits(row + i + j * kLanes, vocab - i - j * kLanes), most);
    }
    if (filled == count && !(largest(most) > values[count - 1])) continue;
    const int64_t end = i + kTopVectors * kLanes < vocab ? i + kTopVectors * kLanes : vocab;
    for (int64_t id = i; id < end; ++id) {
      const float value = row[id] == row[id] ? row[id] : -__builtin_inff();
      if (filled < count || value > values[count - 1]) {
        insert_top(value, static_cast<int32_t>(id), count, &filled, values, ids);
      }
    }
  }
  const V top = set(values[0]);
  V sums[kTopVectors];
  for (V& part : sums) part = set(0.0f);
  for (int64_t i = 0; i < vocab; i += kTopVectors * kLanes) {
    for (int64_t j = 0; j < kTopVectors; ++j) {
      const int64_t at = i + j * kLanes;
      if (at >= vocab) break;
      V part = exponential(load_logits(row + at, vocab - at) - top);
      if (vocab - at < kLanes) {
        part = select_range(0, static_cast<int>(vocab - at), part, set(0.0f));
      }
      sums[j] = sums[j] + part;
    }
  }
  const float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const float normalizer = values[0] + static_cast<float>(std::log(static_cast<double>(total)));
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] - normalizer;
}

// tokens and log_probs [rows, count]; count is at most vocab.
static void top_log_probs(const float* logits, int64_t rows, int64_t vocab, int64_t count,
                          int32_t* tokens, float* log_probs, Pool& pool) {
  auto item = [&](int64_t i, void*) {
    top_row(logits + i * vocab, vocab, count, tokens + i * count, log_probs + i * count);
  };
  pool.each(rows, rows * vocab < 2 * kSerialElements, item);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

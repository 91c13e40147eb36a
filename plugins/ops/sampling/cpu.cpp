// Sampling: rows of raw logits to token ids, or to the distributions they are drawn from. The rules
// are in spec.py; tests/plugins/backends/test_cpu_sampling.py compares with reference.py.
#include <atomic>

#include "../../backends/cpu/rows.h"
#include "draw.h"
#include "transforms.h"

namespace llmctl {
namespace LLMCTL_ISA {

constexpr int64_t kDrawIds = 1 << 14;  // ids that one thread draws over at a time

// Index of the largest value, the lowest index on ties; -1 when any value is NaN. One pass finds
// the first chunk that holds the largest value, then its place in the chunk.
static int32_t argmax_row(const float* row, int64_t columns) {
  constexpr int64_t kChunk = 32 * kLanes;
  const V lowest = set(-__builtin_inff());
  Ints nan[kParts] = {};
  float top = -__builtin_inff();
  int64_t chunk = 0;
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t end = begin + kChunk < columns ? begin + kChunk : columns;
    V best[4] = {lowest, lowest, lowest, lowest};
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) {
        const V value = load(row + i + j * kLanes);
        for (int k = 0; k < kParts; ++k) nan[k] |= value.part[k] != value.part[k];
        best[j] = max(value, best[j]);
      }
    }
    for (; i < end; i += kLanes) {
      const V value = load_some<F32>(row + i, end - i);
      LLMCTL_EACH_PART nan[i] |= value.part[i] != value.part[i];
      best[0] = max(select_range(0, static_cast<int>(end - i), value, lowest), best[0]);
    }
    const float found = largest(max(max(best[0], best[1]), max(best[2], best[3])));
    if (found > top) {
      top = found;
      chunk = begin;
    }
  }
  bool has_nan = false;
  LLMCTL_EACH_PART for (int j = 0; j < kWidth; ++j) has_nan |= nan[i][j] != 0;
  if (has_nan) return -1;
  while (row[chunk] != top) ++chunk;
  return static_cast<int32_t>(chunk);
}

static void argmax_rows(const float* logits, int64_t rows, int64_t columns, int32_t* out,
                        Pool& pool) {
  auto item = [&](int64_t row, void*) { out[row] = argmax_row(logits + row * columns, columns); };
  pool.each(rows, rows * columns < 4 * kSerialElements, item);
}

// Runs f(item) for every item; a failed allocation in any thread is thrown again here.
template <class F>
static void each_guarded(Pool& pool, int64_t items, bool serial, const F& f) {
  std::atomic<bool> failed{false};
  auto guarded = [&](int64_t item, void*) {
    try {
      f(item);
    } catch (const std::bad_alloc&) {
      failed.store(true);
    }
  };
  pool.each(items, serial, guarded);
  if (failed.load()) throw std::bad_alloc();
}

// One row's token, except that a row which is to be drawn in pieces only gets its argmax in `out`:
// then the result is true.
static bool sample_row(const float* logits, int64_t vocab, const SamplingRow& params,
                       int64_t* out) {
  SamplingSpace& own = sampling_space();
  const float* row = penalise(logits, vocab, params, own.row);
  *out = argmax_row(row, vocab);  // what a NaN gives (-1) and what greedy rows want
  if (params.is_greedy || *out < 0 || !(row[*out] >= kLowestLogit)) return false;
  if (row[*out] > kHighestLogit) {  // no distribution: differences of scores would be NaN
    *out = -1;
    return false;
  }
  const bool is_filtered = has_filter(params, vocab);
  if (vocab > kDrawIds && !is_filtered && row == logits) return true;
  const LogitScores scores{row, static_cast<double>(row[*out]), params.temperature};
  const NoiseKey key = key_of(params);
  if (is_filtered) {
    const int64_t count = survivors(row, vocab, row[*out], params, own);
    if (count == 0) return false;  // everything is banned
    const int32_t* ids = own.ids.room(0);
    const double* kept = own.scores.room(0);
    // Not from the best logit: at temperatures that make logits equal, top-p may have cut it.
    Best best(ids[0], kept[0], key);
    draw_list(ids, kept, count, key, best);
    *out = best.id;
    return false;
  }
  Best best(*out, scores.score(*out), key);
  draw_range(scores, 0, vocab, key, best);
  *out = best.id;
  return false;
}

// One token per row of `logits`; -1 for a row that holds NaN, and for one that is to be drawn from
// and holds +inf.
static void sample_rows(const float* logits, int64_t vocab, const SamplingRow* rows, int64_t count,
                        int64_t* out, Pool& pool) {
  Buffer<int64_t> waiting_rows;
  int64_t* waiting = waiting_rows.room(count);  // 1: long, to be drawn in pieces by all threads
  each_guarded(pool, count, count * vocab < kSerialElements, [&](int64_t i) {
    waiting[i] = sample_row(logits + i * vocab, vocab, rows[i], out + i);
  });
  int64_t num_waiting = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (waiting[i] != 0) waiting[num_waiting++] = i;
  }
  if (num_waiting == 0) return;
  const int64_t pieces = (vocab + kDrawIds - 1) / kDrawIds;
  Buffer<Best> best_pieces;
  Best* bests = best_pieces.room(num_waiting * pieces);
  each_guarded(pool, num_waiting * pieces, false, [&](int64_t item) {
    const int64_t i = waiting[item / pieces], first = item % pieces * kDrawIds;
    const int64_t end = first + kDrawIds < vocab ? first + kDrawIds : vocab;
    const float* row = logits + i * vocab;
    const LogitScores scores{row, static_cast<double>(row[out[i]]), rows[i].temperature};
    const NoiseKey key = key_of(rows[i]);
    bests[item] = Best(out[i], scores.score(out[i]), key);
    draw_range(scores, first, end, key, bests[item]);
  });
  for (int64_t item = 0; item < num_waiting * pieces; ++item) {
    const int64_t i = item / pieces * pieces;
    bests[i].offer(bests[item].id, bests[item].score);
    out[waiting[item / pieces]] = bests[i].id;
  }
}

static void probs_row(const float* logits, int64_t vocab, const SamplingRow& params, double* out) {
  SamplingSpace& own = sampling_space();
  const float* row = penalise(logits, vocab, params, own.row);
  int32_t best = argmax_row(row, vocab);
  if (best >= 0 && !params.is_greedy && row[best] > kHighestLogit) best = -1;
  if (best >= 0 && !params.is_greedy && row[best] >= kLowestLogit && !has_filter(params, vocab)) {
    exp_row(row, vocab, row[best], params.temperature, out);
    const double total = sum_doubles(out, vocab);
    for (int64_t i = 0; i < vocab; ++i) out[i] /= total;
    return;
  }
  std::memset(out, 0, vocab * sizeof(double));
  if (best < 0) return;
  if (params.is_greedy || !(row[best] >= kLowestLogit)) {
    out[best] = 1.0;
    return;
  }
  const int64_t count = survivors(row, vocab, row[best], params, own);
  const int32_t* ids = own.ids.room(0);
  double* values = own.scores.room(0);
  for (int64_t i = 0; i < count; ++i) values[i] = exp_score(values[i]);
  const double total = sum_doubles(values, count);
  for (int64_t i = 0; i < count; ++i) out[ids[i]] = values[i] / total;
}

// The distribution of each row, [count, vocab]; zeros for a row that `sample_rows` gives -1.
static void processed_probs(const float* logits, int64_t vocab, const SamplingRow* rows,
                            int64_t count, double* out, Pool& pool) {
  each_guarded(pool, count, count * vocab < kSerialElements, [&](int64_t i) {
    probs_row(logits + i * vocab, vocab, rows[i], out + i * vocab);
  });
}

// A token from a distribution; -1 if nothing is likely.
static int64_t draw_from_probs(const double* probs, int64_t vocab, const SamplingRow& params) {
  double lanes[8] = {}, most = 0;
  int64_t i = 0, top = 0;
  for (; i + 8 <= vocab; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] = probs[i + j] > lanes[j] ? probs[i + j] : lanes[j];
  }
  for (; i < vocab; ++i) most = probs[i] > most ? probs[i] : most;
  for (double lane : lanes) most = lane > most ? lane : most;
  if (!(most > 0)) return -1;
  while (probs[top] != most) ++top;
  const ProbScores scores{probs};
  const NoiseKey key = key_of(params);
  Best best(top, scores.score(top), key);
  draw_range(scores, 0, vocab, key, best);
  return best.id;
}

// out[i] = the uniform of id 0 under the key of rows[i].
static void uniforms(const SamplingRow* rows, int64_t count, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = uniform_of(philox_word(0, key_of(rows[i])));
}

// out[i] = log of the softmax of row i at tokens[i].
static void log_softmax_at(const float* logits, int64_t vocab, const int64_t* tokens, int64_t count,
                           double* out, Pool& pool) {
  auto item = [&](int64_t i, void*) {
    const float* row = logits + i * vocab;
    const int32_t best = argmax_row(row, vocab);
    out[i] = __builtin_nan("");
    if (best < 0) return;
    const double top = row[best];
    out[i] = (static_cast<double>(row[tokens[i]]) - top) - log_of(exp_sum(row, vocab, top, 1.0));
  };
  pool.each(count, count * vocab < kSerialElements, item);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

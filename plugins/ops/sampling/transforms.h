// From raw logits to the ids that may be drawn and their scores, in the order of spec.py.
#pragma once

#include "../../backends/cpu/abi.h"
#include "draw.h"
#include "select.h"

namespace llmctl {
namespace LLMCTL_ISA {

static double sum_piece(const double* values, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += values[i + j];
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] += values[i];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

constexpr int64_t kPiece = 512;  // short sums of short sums keep rounding errors small

static double sum_doubles(const double* values, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; i += kPiece) {
    total += sum_piece(values + i, count - i < kPiece ? count - i : kPiece);
  }
  return total;
}

// out[i] = exp((row[i] - top) / temperature), 0 for banned ids.
__attribute__((noinline)) static void exp_row(const float* row, int64_t count, double top,
                                              double temperature, double* out) {
  for (int64_t i = 0; i < count; ++i) {
    const double value = exp_score((static_cast<double>(row[i]) - top) / temperature);
    out[i] = row[i] >= kLowestLogit ? value : 0.0;
  }
}

static double exp_sum(const float* row, int64_t vocab, double top, double temperature) {
  double piece[kPiece], total = 0;
  for (int64_t i = 0; i < vocab; i += kPiece) {
    const int64_t count = vocab - i < kPiece ? vocab - i : kPiece;
    exp_row(row + i, count, top, temperature, piece);
    total += sum_piece(piece, count);
  }
  return total;
}

// What one thread keeps between rows.
struct SamplingSpace {
  Buffer<float> row;
  Buffer<int32_t> ids;
  Buffer<double> scores;
  Buffer<Item> items, spare;
};

static SamplingSpace& sampling_space() {
  static thread_local SamplingSpace own;
  return own;
}

static bool needs_copy(const SamplingRow& row) {
  return row.num_banned > 0 || row.counts != nullptr;
}

// Steps 1 and 2 of the spec.
static const float* penalise(const float* logits, int64_t vocab, const SamplingRow& params,
                             Buffer<float>& buffer) {
  if (!needs_copy(params)) return logits;
  float* out = buffer.room(vocab);
  std::memcpy(out, logits, vocab * sizeof(float));
  for (int32_t i = 0; i < params.num_banned; ++i) {
    const int32_t id = params.banned[i];
    if (id >= 0 && id < vocab) out[id] = -__builtin_inff();
  }
  if (params.counts == nullptr) return out;
  const float factor = static_cast<float>(params.repetition_penalty);
  const float presence = static_cast<float>(params.presence_penalty);
  const float frequency = static_cast<float>(params.frequency_penalty);
  const int64_t num_counts = params.num_counts < vocab ? params.num_counts : vocab;
  for (int64_t i = 0; i < num_counts; ++i) {
    const float logit = out[i], less = logit * factor, more = logit / factor;
    const float repeated = (logit < 0 ? less : more) - presence;
    const float penalised = repeated - frequency * static_cast<float>(params.counts[i]);
    out[i] = params.counts[i] != 0 ? penalised : logit;
  }
  return out;
}

static bool has_filter(const SamplingRow& params, int64_t vocab) {
  return (params.top_k > 0 && params.top_k < vocab) || params.top_p < 1 || params.min_p > 0;
}

// A logit below every one whose score is at least `least` <= 0.
static float logit_bound(double top, double temperature, double least) {
  const double distance = -least * temperature, size = top < 0 ? -top : top;
  const double bound = top - distance - 1e-6 * (size + distance);
  return bound > kLowestLogit ? static_cast<float>(bound) : kLowestLogit;
}

// Steps 3 and 4 for a row with a filter: writes the surviving ids and their scores to the
// workspace, returns how many.
static int64_t survivors(const float* row, int64_t vocab, float top, const SamplingRow& params,
                         SamplingSpace& own) {
  int32_t* ids = own.ids.room(vocab + 1);
  const double temperature = params.temperature, cut = 1 - params.top_p;
  const double least = params.min_p > 0 ? log_of(params.min_p) : -__builtin_inf();
  float bound = kLowestLogit;
  double total = 0;
  const bool has_top_k = params.top_k > 0 && params.top_k < vocab;
  if (has_top_k) {
    bound = kth_largest(row, vocab, params.top_k, ids, own.items, own.spare);
    if (!(bound >= kLowestLogit)) bound = kLowestLogit;
  } else if (params.top_p < 1) {
    total = exp_sum(row, vocab, top, temperature);
    // Ids below this share hold less than `cut` together.
    bound = logit_bound(top, temperature, log_of(cut * total / static_cast<double>(vocab)));
  } else {
    bound = logit_bound(top, temperature, least);
  }
  int64_t count = collect(row, vocab, bound, ids);
  double* scores = own.scores.room(count);
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = (static_cast<double>(row[ids[i]]) - top) / temperature;
  }
  if (params.top_p < 1) {
    Item* items = own.items.room(count);
    double* values = reinterpret_cast<double*>(own.spare.room(count));
    for (int64_t i = 0; i < count; ++i) values[i] = exp_score(scores[i]);
    if (has_top_k) total = sum_doubles(values, count);
    for (int64_t i = 0; i < count; ++i) items[i] = {values[i], i};  // ids ascend with i
    Item* moved = own.spare.room(count);
    const int64_t kept = select_first<false>(items, count, total, cut * total, moved);
    // Items name places in the lists, which are overwritten: by way of the spare items.
    for (int64_t i = 0; i < kept; ++i) moved[i] = {scores[items[i].id], ids[items[i].id]};
    for (int64_t i = 0; i < kept; ++i) {
      scores[i] = moved[i].value;
      ids[i] = static_cast<int32_t>(moved[i].id);
    }
    count = kept;
  }
  if (params.min_p > 0) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (scores[i] < least) continue;
      scores[kept] = scores[i];
      ids[kept++] = ids[i];
    }
    count = kept;
  }
  return count;
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

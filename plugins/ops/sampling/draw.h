// The draw: which id has the largest score plus noise.
//
// Few ids need their noise as a number. An id with score s beats the best perturbed score B so far
// only if its noise exceeds B - s, that is if -log(u) < exp(s - B); and -log(u) >= 1 - u. So ids
// with 1 - u > exp(s - B), tested in float with a margin, are skipped: all but a few. The
// others get their score in double by the reference's operations, so no token depends on what was
// skipped, nor on how the ids were split over threads.
#pragma once

#include "../../backends/cpu/abi.h"
#include "noise.h"

namespace llmctl {
namespace LLMCTL_ISA {

constexpr float kLowestLogit = -3.402823466e38f;  // banned ids lie below
constexpr float kHighestLogit = 3.402823466e38f;  // above is infinity, where an engine overflowed
constexpr float kMargin = 1.0f + 1e-4f;           // over the error of float shares

static NoiseKey key_of(const SamplingRow& row) {
  return {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32), row.position,
          row.stream};
}

struct Best {
  double score = -__builtin_inf();  // with its noise
  int64_t id = -1;
  float reach = __builtin_inff();  // exp(-score) and the margin

  Best(int64_t first, double plain_score, NoiseKey key) {
    offer(first, plain_score + noise_of(philox_word(first, key)));
  }

  void offer(int64_t other, double perturbed) {
    if (perturbed > score || (perturbed == score && other < id)) {
      score = perturbed;
      id = other;
      const double size = exp_score(score < 0 ? score : -score);
      reach = static_cast<float>(score < 0 ? 1.0 / size : size) * kMargin;
    }
  }
};

// 1 - u of a word, at most half a step too small.
static inline float gap_of(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(~word >> 1)) * 0x1p-31f;
}

// Shares and scores of a row without filters.
struct LogitScores {
  const float* row;
  double top, temperature;

  // p[i] ~ exp(score of id first + i), kNoiseIds of them, 0 beyond `count`.
  void shares(int64_t first, int64_t count, float* p) const {
    const double factor = 1.0 / temperature < 1e300 ? 1.0 / temperature : 1e300;
    for (int64_t i = 0; i < count; ++i) {
      const double scaled = (static_cast<double>(row[first + i]) - top) * factor;
      p[i] = static_cast<float>(scaled < -104.0 ? -104.0 : scaled);
    }
    for (int64_t i = count; i < kNoiseIds; ++i) p[i] = -104.0f;
    for (int64_t i = 0; i < kNoiseIds; i += kLanes) store(p + i, exponential(load(p + i)));
  }
  double score(int64_t id) const {
    if (!(row[id] >= kLowestLogit)) return -__builtin_inf();
    return (static_cast<double>(row[id]) - top) / temperature;
  }
};

// The same for a distribution.
struct ProbScores {
  const double* probs;

  void shares(int64_t first, int64_t count, float* p) const {
    for (int64_t i = 0; i < count; ++i) p[i] = static_cast<float>(probs[first + i]);
    for (int64_t i = count; i < kNoiseIds; ++i) p[i] = 0.0f;
  }
  double score(int64_t id) const { return log_of(probs[id]); }
};

static inline bool any_wins(const uint32_t* words, const float* p, float reach) {
  int32_t wins = 0;
  for (int i = 0; i < kNoiseIds; ++i) wins |= gap_of(words[i]) <= p[i] * reach;
  return wins != 0;
}

// Improves `best` over the ids [first, end); first is a multiple of kNoiseIds.
template <class Scores>
static void draw_range(const Scores& scores, int64_t first, int64_t end, NoiseKey key, Best& best) {
  constexpr float kLeastGap = 0x1p-33f;  // of the largest word
  for (int64_t tile = first; tile < end; tile += kNoiseIds) {
    const int64_t count = end - tile < kNoiseIds ? end - tile : kNoiseIds;
    alignas(64) float p[kNoiseIds];
    alignas(64) uint32_t words[kNoiseIds];
    scores.shares(tile, count, p);
    V most = load(p);
    for (int i = kLanes; i < kNoiseIds; i += kLanes) most = max(load(p + i), most);
    if (largest(most) * best.reach < kLeastGap) continue;
    uint32_t blocks[kNoiseBlocks];
    for (int i = 0; i < kNoiseBlocks; ++i) blocks[i] = static_cast<uint32_t>(tile / 4 + i);
    philox(blocks, key, words);
    if (!any_wins(words, p, best.reach)) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (gap_of(words[i]) <= p[i] * best.reach) {
        best.offer(tile + i, scores.score(tile + i) + noise_of(words[i]));
      }
    }
  }
}

// The same over a list of ids with their scores, whose largest is about 0.
static void draw_list(const int32_t* ids, const double* scores, int64_t count, NoiseKey key,
                      Best& best) {
  for (int64_t tile = 0; tile < count; tile += kNoiseBlocks) {
    const int64_t size = count - tile < kNoiseBlocks ? count - tile : kNoiseBlocks;
    uint32_t blocks[kNoiseBlocks] = {}, words[kNoiseIds];
    for (int64_t i = 0; i < size; ++i) blocks[i] = static_cast<uint32_t>(ids[tile + i]) >> 2;
    philox(blocks, key, words);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t id = ids[tile + i];
      const double score = scores[tile + i];
      const uint32_t word = words[4 * i + (id & 3)];
      const float share = static_cast<float>(exp_score(score < 0 ? score : 0.0));
      if (gap_of(word) <= share * best.reach) best.offer(id, score + noise_of(word));
    }
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

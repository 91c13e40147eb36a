// The two limits of the machine that benchmarks compare with.
#include "rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// The sum of `count` floats, read once by all threads; the time it takes is the caller's business.
static double read_memory(const float* data, int64_t count, Pool& pool) {
  constexpr int64_t kPiece = 1 << 16;
  const int64_t pieces = count / kPiece;
  std::atomic<int> odd{0};  // keeps the loads alive
  auto item = [&](int64_t index, void*) {
    V sums[8];
    for (V& total : sums) total = set(0.0f);
    const float* from = data + index * kPiece;
    for (int64_t i = 0; i < kPiece; i += 8 * kLanes) {
      for (int j = 0; j < 8; ++j) sums[j] = sums[j] + load(from + i + j * kLanes);
    }
    float total = 0;
    for (V& part : sums) total += sum(part);
    if (total == 12345.0f) odd.fetch_add(1);
  };
  pool.each(pieces, false, item);
  return static_cast<double>(pieces * kPiece * 4) + odd.load() * 0.0;
}

// Independent multiply-add chains on every thread; returns the floating-point operations done.
static double multiply_add(int64_t iterations, Pool& pool) {
  // as many chains as the widest tile of linear/cpu.cpp holds in registers
  constexpr int kRows = kParts == 1 ? 4 : 2, kColumns = kParts == 1 ? 6 : 3;
  const int64_t items = pool.num_threads() * 16;
  std::atomic<int> odd{0};
  auto item = [&](int64_t index, void*) {
    V total[kRows][kColumns];
    for (auto& row : total) {
      for (V& chain : row) chain = set(static_cast<float>(index));
    }
    const V a = set(0.999f), b = set(0.001f);
    for (int64_t i = 0; i < iterations; ++i) {
      for (auto& row : total) {
        for (V& chain : row) chain = fma(chain, a, b);
      }
    }
    V all = set(0.0f);
    for (auto& row : total) {
      for (V& chain : row) all = all + chain;
    }
    if (sum(all) == 12345.0f) odd.fetch_add(1);
  };
  pool.each(items, false, item);
  return 2.0 * kLanes * kRows * kColumns * static_cast<double>(iterations * items) + odd.load() * 0.0;
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

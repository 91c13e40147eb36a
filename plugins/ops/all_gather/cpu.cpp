// Columns of all ranks side by side: those that other operators read in every rank, and logits in rank 0, which alone
// samples; the others give theirs. Or, of a step that wants no more of logits, the best id of each row: then a rank
// gives the best of its own.
#include "../../backends/cpu/ranks.h"
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

struct OwnBest {
  float value;
  int32_t id;  // -1: there is NaN; kNoId: the rank has padding alone
};
constexpr int32_t kNoId = -2;

static OwnBest best_of_share(const float* row, int64_t count, int64_t first_id) {
  if (count <= 0) return {0, kNoId};
  const int32_t at = argmax_row(row, count);
  return at < 0 ? OwnBest{0, -1} : OwnBest{row[at], static_cast<int32_t>(first_id + at)};
}

// Ranks have ascending ids, so of equal numbers the first stays: the lowest id.
static int32_t best_of_ranks(const OwnBest* const* shares, int count, int64_t row) {
  OwnBest best{0, kNoId};
  for (int rank = 0; rank < count; ++rank) {
    const OwnBest& own = shares[rank][row];
    if (own.id == -1) return -1;
    if (own.id != kNoId && (best.id == kNoId || own.value > best.value)) best = own;
  }
  return best.id;
}

static void run_best_ids(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &out = op.tensors[1];
  const int64_t rows = rows_of(op, step), width = x.shape[1], columns = out.shape[1];
  const auto* own = static_cast<const float*>(x.data);
  Ranks& ranks = *context.ranks;
  const int64_t first_id = ranks.rank() * width;
  const int64_t count = columns - first_id < width ? columns - first_id : width;
  const int64_t most = kSlotBytes / static_cast<int64_t>(sizeof(OwnBest));
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    auto* given = reinterpret_cast<OwnBest*>(ranks.slot(ranks.rank()));
    each_row(context.pool, some, width, [&](int64_t m, float*) {
      given[m] = best_of_share(own + (first + m) * width, count, first_id);
    });
    ranks.meet();
    if (ranks.rank() == 0) {
      const OwnBest* shares[kMaxRanks];
      for (int rank = 0; rank < ranks.count(); ++rank) {
        shares[rank] = reinterpret_cast<const OwnBest*>(ranks.slot(rank));
      }
      for (int64_t m = 0; m < some; ++m) {
        step.best_ids[first + m] = best_of_ranks(shares, ranks.count(), m);
      }
    }
    ranks.next();
  }
}

static void run_all_gather(const Op& op, const Step& step, Context& context) {
  const bool to_all = op.integers[1] != 0;
  if (step.best_ids != nullptr && !to_all) return run_best_ids(op, step, context);
  const TensorRef &x = op.tensors[0], &out = op.tensors[1];
  const int64_t rows = rows_of(op, step), bytes = dtype_bytes(x.dtype);
  const int64_t width = x.shape[1] * bytes, columns = out.shape[1] * bytes;
  const auto* own = static_cast<const char*>(x.data);
  auto* to = static_cast<char*>(out.data);
  Ranks* ranks = context.ranks;
  auto copy = [&](const void* from, int rank, int64_t first, int64_t some) {
    const int64_t column = rank * width, left = columns - column < width ? columns - column : width;
    if (left <= 0) return;
    each_row(context.pool, some, left / bytes, [&](int64_t m, float*) {
      std::memcpy(to + (first + m) * columns + column, static_cast<const char*>(from) + m * width, left);
    });
  };
  if (ranks == nullptr) {
    copy(own, 0, 0, rows);
    return;
  }
  const int64_t most = kSlotBytes / width;
  const bool is_read = to_all || ranks->rank() == 0;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    std::memcpy(ranks->slot(ranks->rank()), own + first * width, some * width);
    ranks->meet();
    for (int rank = 0; is_read && rank < ranks->count(); ++rank) {
      copy(ranks->slot(rank), rank, first, some);
    }
    ranks->next();
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

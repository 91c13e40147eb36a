// Logits of all ranks side by side, in rank 0, which alone samples; the others give theirs.
#include "../../backends/cpu/ranks.h"
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

static void run_all_gather(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &out = op.tensors[1];
  const int64_t rows = rows_of(op, step), width = x.shape[1], columns = out.shape[1];
  const auto* own = static_cast<const float*>(x.data);
  auto* to = static_cast<float*>(out.data);
  Ranks* ranks = context.ranks;
  auto copy = [&](const float* from, int rank, int64_t first, int64_t some) {
    const int64_t column = rank * width, left = columns - column < width ? columns - column : width;
    if (left <= 0) return;
    each_row(context.pool, some, left, [&](int64_t m, float*) {
      std::memcpy(to + (first + m) * columns + column, from + m * width, left * 4);
    });
  };
  if (ranks == nullptr) {
    copy(own, 0, 0, rows);
    return;
  }
  const int64_t most = kSlotBytes / 4 / width;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    std::memcpy(ranks->slot(ranks->rank()), own + first * width, some * width * 4);
    ranks->meet();
    for (int rank = 0; ranks->rank() == 0 && rank < ranks->count(); ++rank) {
      copy(ranks->slot(rank), rank, first, some);
    }
    ranks->next();
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

// Logits of a reduced vocabulary, by token of the whole one.
#include <limits>

#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// A row is cut into pieces so that one token can use all threads.
constexpr int64_t kExpandPiece = 8192;

static void run_expand_logits(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &index = op.tensors[1], &out = op.tensors[2];
  const int64_t width = x.shape[1], vocab = out.shape[1];
  const int64_t pieces = (vocab + kExpandPiece - 1) / kExpandPiece;
  const auto* columns = static_cast<const int32_t*>(index.data);
  LLMCTL_ASSERT(index.shape[0] == vocab && rows_of(op, step) <= out.shape[0]);
  each_row(context.pool, rows_of(op, step) * pieces, kExpandPiece, [&](int64_t item, float*) {
    const int64_t row = item / pieces, first = item % pieces * kExpandPiece;
    const int64_t end = first + kExpandPiece < vocab ? first + kExpandPiece : vocab;
    const auto* source = static_cast<const float*>(x.data) + row * width;
    auto* target = static_cast<float*>(out.data) + row * vocab;
    for (int64_t v = first; v < end; ++v) {
      const int64_t column = columns[v];
      const bool is_column = 0 <= column && column < width;
      target[v] = is_column ? source[column] : -std::numeric_limits<float>::infinity();
    }
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

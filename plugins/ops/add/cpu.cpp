// The sum of two activations, rounded where reference.py rounds.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// A row is cut into pieces so that one token can use all threads.
constexpr int64_t kAddPiece = 4096;

static void run_add(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &residual = op.tensors[1], &out = op.tensors[2];
  const int64_t width = x.shape[1], pieces = (width + kAddPiece - 1) / kAddPiece;
  LLMCTL_ASSERT(out.shape[1] == width && residual.shape[1] == width &&
                rows_of(op, step) <= x.shape[0]);
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    using Element = typename T::Element;
    each_row(context.pool, rows_of(op, step) * pieces, kAddPiece, [&](int64_t item, float*) {
      const int64_t first = item % pieces * kAddPiece, start = item / pieces * width + first;
      const int64_t count = width - first < kAddPiece ? width - first : kAddPiece;
      const auto* from = static_cast<const Element*>(x.data) + start;
      const auto* added = static_cast<const Element*>(residual.data) + start;
      auto* to = static_cast<Element*>(out.data) + start;
      for (int64_t i = 0; i < count; i += kLanes) {
        const V sum = load_some<T>(from + i, count - i) + load_some<T>(added + i, count - i);
        store_some<T>(to + i, T::round(sum), count - i);
      }
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

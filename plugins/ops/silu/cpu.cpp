// SiLU, and a residual added behind it, rounded where reference.py rounds.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// A row is cut into pieces so that one token can use all threads.
constexpr int64_t kSiluPiece = 1024;

static void run_silu(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &residual = op.tensors[1], &out = op.tensors[2];
  const int64_t width = x.shape[1], pieces = (width + kSiluPiece - 1) / kSiluPiece;
  LLMCTL_ASSERT(out.shape[1] == width && rows_of(op, step) <= x.shape[0]);
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    using Element = typename T::Element;
    each_row(context.pool, rows_of(op, step) * pieces, kSiluPiece * 2, [&](int64_t item, float*) {
      const int64_t first = item % pieces * kSiluPiece, start = item / pieces * width + first;
      const int64_t count = width - first < kSiluPiece ? width - first : kSiluPiece;
      const auto* added = static_cast<const Element*>(residual.data);
      for (int64_t i = 0; i < count; i += kLanes) {
        const V v = load_some<T>(static_cast<const Element*>(x.data) + start + i, count - i);
        V value = T::round(v / (set(1.0f) + exponential(set(0.0f) - v)));
        if (added != nullptr) value = T::round(value + load_some<T>(added + start + i, count - i));
        store_some<T>(static_cast<Element*>(out.data) + start + i, value, count - i);
      }
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

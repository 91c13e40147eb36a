// SiLU(gate) * up, rounded where reference.py rounds, with optional quantization.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// A row is cut into pieces so that one token can use all threads; per-token scales need whole rows.
constexpr int64_t kSwigluPiece = 1024;

static void run_swiglu(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &scale = op.tensors[1];
  const TensorRef &out = op.tensors[2], &out_scale = op.tensors[3];
  const int64_t width = out.shape[1];
  LLMCTL_ASSERT(x.shape[1] == 2 * width && rows_of(op, step) <= x.shape[0]);
  const int64_t piece = out_scale.data != nullptr ? width : kSwigluPiece;
  const int64_t pieces = (width + piece - 1) / piece;
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    each_row(context.pool, rows_of(op, step) * pieces, piece * 4, [&](int64_t item, float* row) {
      const int64_t token = item / pieces, first = item % pieces * piece;
      const int64_t count = width - first < piece ? width - first : piece;
      const auto* gate = static_cast<const typename T::Element*>(x.data) + token * 2 * width + first;
      const auto* up = gate + width;
      for (int64_t i = 0; i < count; i += kLanes) {
        const V g = load_some<T>(gate + i, count - i);
        const V silu = T::round(g / (set(1.0f) + exponential(set(0.0f) - g)));
        store(row + i, T::round(silu * load_some<T>(up + i, count - i)));
      }
      TensorRef target = out;
      const int64_t start = token * width + first;
      target.data = static_cast<char*>(out.data) + start * dtype_bytes(out.dtype);
      if (out_scale.data != nullptr) {
        write_output(out, scale, out_scale, token, row, count);
      } else {
        write_output(target, scale, out_scale, 0, row, count);
      }
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

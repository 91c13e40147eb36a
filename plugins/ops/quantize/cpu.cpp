// Quantization of an activation to FP8, static or per token.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

static void run_quantize(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &scale = op.tensors[1];
  const TensorRef &out = op.tensors[2], &out_scale = op.tensors[3];
  const int64_t width = x.shape[1];
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* source = static_cast<const typename T::Element*>(x.data);
    each_row(context.pool, rows_of(op, step), width, [&](int64_t row, float* values) {
      for (int64_t i = 0; i < width; i += kLanes) {
        store(values + i, load_some<T>(source + row * width + i, width - i));
      }
      write_output(out, scale, out_scale, row, values, width);
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

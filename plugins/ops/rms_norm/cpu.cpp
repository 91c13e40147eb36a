// Residual addition, RMS normalization and quantization, one row at a time.
//
// Rounds where reference.py rounds. The sum of squares runs in 16 lanes along the row, whatever
// else is in the step.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// row / rms(row) * weight in place; both roundings are to T.
template <class T>
static inline void normalize(float* row, const typename T::Element* weight, int64_t width,
                             float epsilon) {
  V squares = set(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const V value = load_some<F32>(row + i, width - i);
    squares = fma(value, value, squares);
  }
  const float mean = sum(squares) / static_cast<float>(width);
  const V scale = set(1.0f / square_root(mean + epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const V value = T::round(load_some<F32>(row + i, width - i) * scale);
    store_some<F32>(row + i, T::round(load_some<T>(weight + i, width - i) * value), width - i);
  }
}

static void run_rms_norm(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &weight = op.tensors[1], &residual = op.tensors[2];
  const TensorRef &scale = op.tensors[3], &out = op.tensors[4], &residual_out = op.tensors[5];
  const TensorRef& out_scale = op.tensors[6];
  const int64_t width = x.shape[1];
  const float epsilon = static_cast<float>(op.reals[0]);
  LLMCTL_ASSERT(weight.shape[0] == width && rows_of(op, step) <= x.shape[0]);
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    each_row(context.pool, rows_of(op, step), width, [&](int64_t index, float* row) {
      const int64_t start = index * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        V value = load_some<T>(static_cast<const E*>(x.data) + start + i, left);
        if (residual.data != nullptr) {
          const E* other = static_cast<const E*>(residual.data) + start + i;
          value = T::round(value + load_some<T>(other, left));
        }
        if (residual_out.data != nullptr) {
          store_some<T>(static_cast<E*>(residual_out.data) + start + i, value, left);
        }
        store_some<F32>(row + i, value, left);
      }
      normalize<T>(row, static_cast<const E*>(weight.data), width, epsilon);
      write_output(out, scale, out_scale, index, row, width);
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

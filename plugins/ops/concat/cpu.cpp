// Two rows side by side.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

static void run_concat(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &y = op.tensors[1], &out = op.tensors[2];
  const int64_t first = x.shape[1] * dtype_bytes(x.dtype), second = y.shape[1] * dtype_bytes(y.dtype);
  LLMCTL_ASSERT(out.shape[1] == x.shape[1] + y.shape[1] && rows_of(op, step) <= y.shape[0]);
  each_row(context.pool, rows_of(op, step), out.shape[1], [&](int64_t row, float*) {
    char* target = static_cast<char*>(out.data) + row * (first + second);
    std::memcpy(target, static_cast<const char*>(x.data) + row * first, first);
    std::memcpy(target + first, static_cast<const char*>(y.data) + row * second, second);
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

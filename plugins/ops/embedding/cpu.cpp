// Rows of a table by index: also the whole of gather_rows.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

static void copy_rows(const TensorRef& from, const TensorRef& to, const int32_t* index,
                      int64_t rows, Context& context) {
  const int64_t bytes = from.shape[1] * dtype_bytes(from.dtype);
  const auto* source = static_cast<const char*>(from.data);
  auto* target = static_cast<char*>(to.data);
  LLMCTL_ASSERT(rows <= to.shape[0] && from.shape[1] == to.shape[1] && from.dtype == to.dtype);
  each_row(context.pool, rows, from.shape[1], [&](int64_t row, float*) {
    LLMCTL_ASSERT(0 <= index[row] && index[row] < from.shape[0]);
    std::memcpy(target + row * bytes, source + index[row] * bytes, bytes);
  });
}

static void run_embedding(const Op& op, const Step& step, Context& context) {
  copy_rows(op.tensors[0], op.tensors[1], step.token_ids, step.num_tokens, context);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

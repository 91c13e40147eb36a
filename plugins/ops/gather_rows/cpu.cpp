// The rows of an activation that get logits.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

static void run_gather_rows(const Op& op, const Step& step, Context& context) {
  copy_rows(op.tensors[0], op.tensors[1], step.logit_rows, step.num_rows, context);
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

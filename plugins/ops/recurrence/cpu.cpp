// One step of a recurrence, rounded where reference.py rounds.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

// A row is cut into pieces so that one token can use all threads.
constexpr int64_t kRecurrencePiece = 1024;

static void run_recurrence(const Op& op, const Step& step, Context& context) {
  const TensorRef &x = op.tensors[0], &kept = op.tensors[1], &carry = op.tensors[2];
  const TensorRef &out = op.tensors[3], &state = op.tensors[4];
  const int64_t width = x.shape[1], pieces = (width + kRecurrencePiece - 1) / kRecurrencePiece;
  const bool is_activated = op.integers[0] != 0;
  const bool has_context = kept.data != nullptr;
  LLMCTL_ASSERT(!has_context || (out.shape[1] == 2 * width && kept.shape[1] >= width));
  LLMCTL_ASSERT(rows_of(op, step) <= x.shape[0] && rows_of(op, step) <= step.num_rows);
  with_model_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    each_row(context.pool, rows_of(op, step) * pieces, kRecurrencePiece * 3,
             [&](int64_t item, float*) {
      const int64_t row = item / pieces, first = item % pieces * kRecurrencePiece;
      const int64_t before = step.logit_rows[row];
      const int64_t count = width - first < kRecurrencePiece ? width - first : kRecurrencePiece;
      const E* taken = static_cast<const E*>(x.data) + row * width + first;
      const E* held = nullptr;
      E* wide = nullptr;
      if (has_context) {
        held = static_cast<const E*>(kept.data) + before * kept.shape[1] + first;
        wide = static_cast<E*>(out.data) + row * 2 * width + first;
      }
      E* next = static_cast<E*>(state.data) + row * width + first;
      for (int64_t i = 0; i < count; i += kLanes) {
        V value = load_some<T>(taken + i, count - i);
        if (carry.data != nullptr) {
          const E* other = static_cast<const E*>(carry.data) + before * width + first + i;
          value = T::round(value + load_some<T>(other, count - i));
        }
        if (is_activated) {
          value = T::round(value / (set(1.0f) + exponential(set(0.0f) - value)));
        }
        store_some<T>(next + i, value, count - i);
        if (!has_context) continue;
        store_some<T>(wide + width + i, value, count - i);
        store_some<T>(wide + i, load_some<T>(held + i, count - i), count - i);
      }
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

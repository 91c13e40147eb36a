// The sum of all ranks' partial sums, then what ends a product: scale, bias, one rounding.
//
// Ranks are added as a balanced tree, (0 + 1) + (2 + 3), whatever else is in the step, and every
// rank computes the same sum, so all of them go on with the same bits. A rank's own numbers may be
// parts of a sum, side by side, which are added first, as a tree, too.
#include "../../backends/cpu/ranks.h"
#include "../linear/epilogue.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

// 16 numbers of ranks or parts [rank, rank + count), each `stride` floats behind the one before.
inline V add_ranks(const float* first, int64_t stride, int rank, int count) {
  if (count == 1) return load(first + rank * stride);
  const int half = count / 2;
  return add_ranks(first, stride, rank, half) + add_ranks(first, stride, rank + half, half);
}

// `count` numbers of a row, whose parts lie `width` floats apart, as one sum.
inline void add_parts(const float* row, int64_t width, int leaves, int64_t count, float* to) {
  if (leaves == 1) {
    std::memcpy(to, row, count * 4);
    return;
  }
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) store(to + c, add_ranks(row + c, width, 0, leaves));
  if (c == count) return;
  float last[kMaxRanks * kLanes] = {}, total[kLanes];  // beyond a row may be the tensor's end
  for (int leaf = 0; leaf < leaves; ++leaf) {
    std::memcpy(last + leaf * kLanes, row + leaf * width + c, (count - c) * 4);
  }
  store(total, add_ranks(last, kLanes, 0, leaves));
  std::memcpy(to + c, total, (count - c) * 4);
}

}  // namespace

static void run_all_reduce(const Op& op, const Step& step, Context& context) {
  const TensorRef& x = op.tensors[0];
  const int leaves = op.integers[1] > 1 ? int(op.integers[1]) : 1;
  const int64_t rows = rows_of(op, step), width = x.shape[1] / leaves;
  const Epilogue epilogue{op.tensors[1], op.tensors[2], op.tensors[3], op.tensors[4], 1.0f};
  const auto* own = static_cast<const float*>(x.data);
  Ranks* ranks = context.ranks;
  if (ranks == nullptr) {
    each_row(context.pool, rows, width, [&](int64_t m, float* sums) {
      for (int64_t c = 0; c < width; c += kLanes) {
        const int64_t count = width - c < kLanes ? width - c : kLanes;
        add_parts(own + m * leaves * width + c, width, leaves, count, sums);
        epilogue.finish(sums, m, c, count);
      }
    });
    return;
  }
  const int64_t most = kSlotBytes / 4 / width;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    float* slot = ranks->slot(ranks->rank());
    for (int64_t m = 0; m < some; ++m) {
      add_parts(own + (first + m) * leaves * width, width, leaves, width, slot + m * width);
    }
    ranks->meet();
    const float* slots = ranks->slot(0);
    each_row(context.pool, some, width, [&](int64_t m, float* sums) {
      int64_t c = 0;
      for (; c + kLanes <= width; c += kLanes) {
        store(sums, add_ranks(slots + m * width + c, kSlotBytes / 4, 0, ranks->count()));
        epilogue.finish(sums, first + m, c, kLanes);
      }
      if (c == width) return;
      // Beyond a row lies the next, or the end of a slot: copied, so that no rank reads past it.
      float last[kMaxRanks * kLanes] = {};
      for (int rank = 0; rank < ranks->count(); ++rank) {
        std::memcpy(last + rank * kLanes, slots + rank * (kSlotBytes / 4) + m * width + c,
                    (width - c) * 4);
      }
      store(sums, add_ranks(last, kLanes, 0, ranks->count()));
      epilogue.finish(sums, first + m, c, width - c);
    });
    ranks->next();
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

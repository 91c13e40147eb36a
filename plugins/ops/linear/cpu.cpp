// Matrix product: x [M, K] times weight [O, K], transposed.
//
// Every output element is one chain of 16-lane multiply-adds over k, 16 values a step, in order,
// and one reduction tree at the end. Tile shapes, cache blocks and threads only decide when a part
// of the chain is computed (an unfinished chain is parked in memory with all 16 lanes), so an
// element has the same bits whatever M is.
//
// With leaves, K is cut into 2, 4 or 8 equal parts, each a chain and a tree of its own, whose sums
// are joined as a balanced tree: ranks that have whole subtrees of it give the same bits.
//
// Few tokens: weights are read from memory once and widened in registers. Many tokens: a block
// of weights is widened once into scratch and multiplied by all tokens of a group. Activations are widened
// to float32 rows, padded with zeros to whole vectors, before either: into memory that all threads
// read, or, if they are few, by each thread for itself, which costs less than fetching from another core
// what that has just written.
#include "epilogue.h"
#include "tiles.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

constexpr int64_t kBlockInner = 1024;  // k values of a widened block: 128 KiB of weights
constexpr int64_t kGroupTokens = 132;  // that are multiplied by a widened block: a chunk of 128, too
constexpr int64_t kFewTokens = 4 * kTileTokens;  // up to here weights are widened in registers
constexpr int64_t kSerialProducts = 1 << 17;  // M * K * O below this runs on one thread

static_assert(kBlockRows % kTileRows == 0, "whole tiles");

constexpr int64_t kWidenedFloats = kBlockRows * (kBlockInner + kLanes);
constexpr int64_t kParkedFloats = (kGroupTokens + kTileTokens) * kBlockRows * kLanes;
constexpr int64_t kSumFloats = (kGroupTokens + kTileTokens) * kBlockRows;
constexpr int64_t kOwnFloats = kWidenedFloats + kParkedFloats;  // that few tokens do not use else
constexpr int kSumBuffers = 4;  // of the 8 leaves of a tree, three sums wait for one that is made
static_assert((kOwnFloats + kSumBuffers * kSumFloats) * 4 <= (int64_t)kScratchBytes, "fits");

int64_t padded(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

// Floats from one widened row to the next: a vector more than the row, because rows a power of two
// apart would compete for the same cache sets.
int64_t stride_of(int64_t k) { return padded(k) + kLanes; }

// Up to kBlockRows weight rows against a few tokens; sums [tokens][kBlockRows].
template <class W>
void stream_block(const typename W::Element* weight, int64_t stride, int rows, int64_t inner,
                  Rows x, int64_t tokens, float* sums) {
  const int64_t groups = (tokens + kTileTokens - 1) / kTileTokens;
  int row = 0;
  auto all_groups = [&](auto tile) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * tokens / groups, last = (g + 1) * tokens / groups;
      tile(Rows{x.data + first * x.stride, x.stride}, static_cast<int>(last - first),
           sums + first * kBlockRows + row);
    }
  };
  for (; row + kFewRows <= rows; row += kFewRows) {
    all_groups([&](Rows part, int count, float* to) {
      stream_rows<W, kFewRows>(weight + row * stride, stride, inner, part, count, to);
    });
  }
  for (; row < rows; ++row) {
    all_groups([&](Rows part, int count, float* to) {
      stream_rows<W, 1>(weight + row * stride, stride, inner, part, count, to);
    });
  }
}

// Up to kBlockRows weight rows against up to kGroupTokens tokens; sums [tokens][kBlockRows].
template <class W>
void widened_block(const typename W::Element* weight, int64_t weight_stride, int rows,
                   int64_t inner, Rows x, int64_t tokens, float* scratch, float* sums) {
  float* widened = scratch;
  float* parked = widened + kWidenedFloats;
  const int tile_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t first = 0; first < inner; first += kBlockInner) {
    const int64_t count = inner - first < kBlockInner ? inner - first : kBlockInner;
    const int64_t stride = stride_of(count), steps = padded(count) / kLanes;
    for (int r = 0; r < tile_rows; ++r) {
      if (r < rows) {
        widen_row<W>(weight + r * weight_stride + first, count, widened + r * stride);
      } else {
        std::memset(widened + r * stride, 0, stride * sizeof(float));
      }
    }
    for (int64_t t = 0; t < tokens; t += kTileTokens) {
      const int part = static_cast<int>(tokens - t < kTileTokens ? tokens - t : kTileTokens);
      const Rows tile{x.data + t * x.stride + first, x.stride};
      for (int r = 0; r < tile_rows; r += kTileRows) {
        const int64_t at = t * kBlockRows + r;
        widened_tokens(part, widened + r * stride, stride, tile, steps, first == 0, first + count == inner, parked + at * kLanes, sums + at);
      }
    }
  }
}

// float32 rows of tokens [token, token + tokens): the tensor itself if it can be used directly.
Rows widen_tokens(const TensorRef& x, int64_t token, int64_t tokens, bool serial,
                  Context& context) {
  const int64_t inner = x.shape[1], stride = stride_of(inner);
  if (x.dtype == kF32 && inner == padded(inner)) {
    return Rows{static_cast<const float*>(x.data) + token * inner, inner};
  }
  float* target = context.shared;
  with_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* source = static_cast<const typename T::Element*>(x.data) + token * inner;
    auto widen = [&](int64_t m, void*) {
      widen_row<T>(source + m * inner, inner, target + m * stride);
    };
    context.pool.each(tokens, serial || tokens * inner < kSerialElements, widen);
  });
  return Rows{target, stride};
}

std::atomic<uint64_t> g_products{0};  // numbers those whose activations threads widen themselves

// float32 rows of all tokens in a thread's own scratch, widened by its first item of a product.
Rows widen_own(const TensorRef& x, int64_t token, int64_t tokens, uint64_t product, float* own) {
  thread_local uint64_t last = 0;
  const int64_t inner = x.shape[1], stride = stride_of(inner);
  if (last != product) {
    with_type(x.dtype, [&](auto type) {
      using T = decltype(type);
      const auto* source = static_cast<const typename T::Element*>(x.data) + token * inner;
      for (int64_t m = 0; m < tokens; ++m) {
        widen_row<T>(source + m * inner, inner, own + m * stride);
      }
    });
    last = product;
  }
  return Rows{own, stride};
}

template <class W>
void multiply_chunk(const Op& op, float unit, int64_t token, int64_t tokens, Context& context) {
  const TensorRef &x = op.tensors[0], &weight = op.tensors[1];
  const int64_t outputs = weight.shape[0], inner = weight.shape[1];
  const auto* weights = static_cast<const typename W::Element*>(weight.data);
  const bool serial = tokens * outputs * inner < kSerialProducts;
  const int64_t leaves = op.integers[1] > 1 ? op.integers[1] : 1, leaf = inner / leaves;
  const Epilogue epilogue{op.tensors[2], op.tensors[3], op.tensors[4], op.tensors[5], unit};
  const int64_t blocks = (outputs + kBlockRows - 1) / kBlockRows;
  const bool is_few = tokens <= kFewTokens;
  const bool is_own = is_few && !serial && tokens * stride_of(inner) <= kOwnFloats;
  const uint64_t product = is_own ? g_products.fetch_add(1, std::memory_order_relaxed) + 1 : 0;
  const Rows shared = is_own ? Rows{} : widen_tokens(x, token, tokens, serial, context);
  const int64_t groups = is_few ? 1 : (tokens + kGroupTokens - 1) / kGroupTokens;
  auto item = [&](int64_t index, void* scratch) {
    const int64_t row = index / groups * kBlockRows, group = index % groups;
    const int count = static_cast<int>(outputs - row < kBlockRows ? outputs - row : kBlockRows);
    // groups end on whole tiles
    const int64_t per_group =
        ((tokens + groups - 1) / groups + kTileTokens - 1) / kTileTokens * kTileTokens;
    const int64_t first = group * per_group;
    const int64_t some = tokens - first < per_group ? tokens - first : per_group;
    if (some <= 0) return;
    auto* own = static_cast<float*>(scratch);
    const Rows rows = is_own ? widen_own(x, token, tokens, product, own) : shared;
    const Rows part{rows.data + first * rows.stride, rows.stride};
    float* sums = own + kOwnFloats;
    // leaves [at, at + of) of the tree, into `to` and the buffers behind it
    auto add_leaves = [&](auto&& again, int64_t at, int64_t of, float* to) -> void {
      if (of > 1) {
        float* other = to + kSumFloats;
        again(again, at, of / 2, to);
        again(again, at + of / 2, of / 2, other);
        for (int64_t i = 0; i < some * kBlockRows; i += kLanes) {
          store(to + i, load(to + i) + load(other + i));
        }
        return;
      }
      const auto* from = weights + row * inner + at * leaf;
      const Rows x_part{part.data + at * leaf, part.stride};
      if (is_few) {
        stream_block<W>(from, inner, count, leaf, x_part, some, to);
      } else {
        widened_block<W>(from, inner, count, leaf, x_part, some, own, to);
      }
    };
    add_leaves(add_leaves, 0, leaves, sums);
    for (int64_t m = 0; m < some; ++m) {
      epilogue.finish(sums + m * kBlockRows, token + first + m, row, count);
    }
  };
  context.pool.each(blocks * groups, serial, item);
}

}  // namespace

static void run_linear(const Op& op, const Step& step, Context& context) {
  const int64_t tokens = rows_of(op, step);
  LLMCTL_ASSERT(tokens <= op.tensors[0].shape[0] && tokens <= op.tensors[5].shape[0]);
  LLMCTL_ASSERT(op.tensors[0].shape[1] == op.tensors[1].shape[1]);
  LLMCTL_ASSERT(op.tensors[3].data == nullptr || op.tensors[3].shape[0] == 1 ||
                op.tensors[3].shape[0] >= tokens);
  const int64_t chunks = (tokens + kLinearChunkTokens - 1) / kLinearChunkTokens;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t first = c * tokens / chunks, last = (c + 1) * tokens / chunks;
    switch (op.tensors[1].dtype) {
      case kF32: multiply_chunk<F32>(op, 1.0f, first, last - first, context); break;
      case kBF16: multiply_chunk<BF16>(op, 1.0f, first, last - first, context); break;
      case kF16: multiply_chunk<F16>(op, 1.0f, first, last - first, context); break;
      default: multiply_chunk<F8Weight>(op, F8Weight::kUnit, first, last - first, context);
    }
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

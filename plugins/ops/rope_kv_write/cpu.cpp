// Query/key normalization, rotary embedding and the write into the paged cache, token by token.
//
// Rotary factors, both products and their sum round to the model dtype, as in reference.py.
#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {

template <class T>
static inline void rotate(float* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const V c = load_some<F32>(cosine + i, left), s = load_some<F32>(sine + i, left);
    const V first = load_some<F32>(head + i, left), second = load_some<F32>(head + half + i, left);
    store_some<F32>(head + i, T::round(T::round(first * c) - T::round(second * s)), left);
    store_some<F32>(head + half + i, T::round(T::round(second * c) + T::round(first * s)), left);
  }
}

static void run_rope_kv_write(const Op& op, const Step& step, Context& context) {
  enum { kQkv, kRotary, kQNorm, kKNorm, kKScale, kVScale, kQ };
  const int64_t layer = op.integers[0], num_heads = op.integers[1], num_kv_heads = op.integers[2];
  const int64_t size = op.integers[3], half = size / 2;
  const float epsilon = static_cast<float>(op.reals[4]);
  const int64_t width = (num_heads + 2 * num_kv_heads) * size;
  const int64_t per_block = step.tokens_per_block;
  const auto* rotary = static_cast<const float*>(op.tensors[kRotary].data);
  LLMCTL_ASSERT(0 <= layer && layer < step.num_layers && num_kv_heads == step.num_kv_heads);
  LLMCTL_ASSERT(size == step.head_size && op.tensors[kQkv].shape[1] == width);

  with_model_type(op.tensors[kQkv].dtype, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    auto read_head = [&](float* head, const E* source, const TensorRef& norm) {
      for (int64_t i = 0; i < size; i += kLanes) {
        store_some<F32>(head + i, load_some<T>(source + i, size - i), size - i);
      }
      if (norm.data != nullptr) {
        normalize<T>(head, static_cast<const E*>(norm.data), size, epsilon);
      }
    };
    auto write_cache = [&](const float* head, int64_t which, int64_t kv_head, int64_t slot,
                           const TensorRef& scale) {
      LLMCTL_ASSERT(0 <= slot && slot < step.num_blocks * per_block);
      const int64_t block = slot / per_block, offset = slot % per_block;
      const int64_t page = ((layer * step.num_blocks + block) * 2 + which) * num_kv_heads + kv_head;
      const int64_t at = (page * per_block + offset) * size;
      const float unit = scale.data != nullptr ? *static_cast<const float*>(scale.data) : 1.0f;
      if (step.kv_dtype == kF8) {
        store_fp8(static_cast<uint8_t*>(step.kv_cache) + at, head, size, unit);
        return;
      }
      if (step.kv_dtype == kI8) {
        store_scaled<I8>(static_cast<int8_t*>(step.kv_cache) + at, head, size, unit);
        return;
      }
      with_model_type(step.kv_dtype, [&](auto cache_type) {
        using C = decltype(cache_type);
        store_row<C>(static_cast<typename C::Element*>(step.kv_cache) + at, head, size);
      });
    };
    each_row(context.pool, step.num_tokens, width, [&](int64_t token, float* scratch) {
      float *head = scratch, *cosine = head + kMaxHeadSize, *sine = cosine + kMaxHeadSize;
      const float* factors = rotary + step.position_ids[token] * size;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t left = half - i;
        store_some<F32>(cosine + i, T::round(load_some<F32>(factors + i, left)), left);
        store_some<F32>(sine + i, T::round(load_some<F32>(factors + half + i, left)), left);
      }
      const E* qkv = static_cast<const E*>(op.tensors[kQkv].data) + token * width;
      E* q = static_cast<E*>(op.tensors[kQ].data) + token * num_heads * size;
      for (int64_t h = 0; h < num_heads; ++h) {
        read_head(head, qkv + h * size, op.tensors[kQNorm]);
        rotate<T>(head, cosine, sine, half);
        store_row<T>(q + h * size, head, size);
      }
      const int64_t slot = step.slot_mapping[token];
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        read_head(head, qkv + (num_heads + h) * size, op.tensors[kKNorm]);
        rotate<T>(head, cosine, sine, half);
        write_cache(head, 0, h, slot, op.tensors[kKScale]);
        read_head(head, qkv + (num_heads + num_kv_heads + h) * size, TensorRef{});
        write_cache(head, 1, h, slot, op.tensors[kVScale]);
      }
    });
  });
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

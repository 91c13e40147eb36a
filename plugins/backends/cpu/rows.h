// What the row-wise ops share: picking the element type, splitting rows over threads, and the
// output stage that stores a row in the model dtype or quantizes it to FP8.
#pragma once

#include "abi.h"
#include "elements.h"
#include "pool.h"

namespace llmctl {
namespace LLMCTL_ISA {

// Work below this many elements is not worth waking threads for (about 5 us of one core).
constexpr int64_t kSerialElements = 1 << 14;

// f(T{}) with the element type of a model dtype.
template <class F>
static inline void with_model_type(int32_t dtype, F&& f) {
  switch (dtype) {
    case kF32: f(F32{}); return;
    case kBF16: f(BF16{}); return;
    default: f(F16{}); return;
  }
}

// The same where FP8 may occur too.
template <class F>
static inline void with_type(int32_t dtype, F&& f) {
  switch (dtype) {
    case kF32: f(F32{}); return;
    case kBF16: f(BF16{}); return;
    case kF16: f(F16{}); return;
    default: f(F8{}); return;
  }
}

// The element types that keys and values are cached in.
template <class F>
static inline void with_cache_type(int32_t dtype, F&& f) {
  if (dtype == kI8) {
    f(I8{});
    return;
  }
  with_type(dtype, f);
}

// f(row, scratch) for every row, several rows to an item.
template <class F>
static inline void each_row(Pool& pool, int64_t rows, int64_t width, F&& f) {
  const int64_t per_item = 1 + kSerialElements / 8 / (width + 1);
  auto item = [&](int64_t index, void* scratch) {
    const int64_t end = (index + 1) * per_item < rows ? (index + 1) * per_item : rows;
    for (int64_t row = index * per_item; row < end; ++row) f(row, static_cast<float*>(scratch));
  };
  pool.each((rows + per_item - 1) / per_item, rows * width < kSerialElements, item);
}

template <class T>
static inline void store_row(typename T::Element* out, const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    store_some<T>(out + i, load_some<F32>(row + i, width - i), width - i);
  }
}

// FP8 or INT8 of row / scale: a true division, as the references do.
template <class T>
static inline void store_scaled(typename T::Element* out, const float* row, int64_t width,
                                float scale) {
  const V divisor = set(scale);
  for (int64_t i = 0; i < width; i += kLanes) {
    store_some<T>(out + i, load_some<F32>(row + i, width - i) / divisor, width - i);
  }
}
static inline void store_fp8(uint8_t* out, const float* row, int64_t width, float scale) {
  store_scaled<F8>(out, row, width, scale);
}

static inline float row_scale(const float* row, int64_t width) {
  V most = set(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    most = max(abs(load_some<F32>(row + i, width - i)), most);
  }
  const float top = largest(most);
  return top == 0.0f ? 1.0f : top / kF8Max;
}

// `row` holds values already rounded to the model dtype.
static inline void write_output(const TensorRef& out, const TensorRef& scale,
                                const TensorRef& out_scale, int64_t index, const float* row,
                                int64_t width) {
  LLMCTL_ASSERT((out.dtype == kF8) == (out_scale.data != nullptr || scale.data != nullptr));
  if (out_scale.data != nullptr) {
    const float own = row_scale(row, width);
    static_cast<float*>(out_scale.data)[index] = own;
    store_fp8(static_cast<uint8_t*>(out.data) + index * width, row, width, own);
  } else if (scale.data != nullptr) {
    store_fp8(static_cast<uint8_t*>(out.data) + index * width, row, width,
              *static_cast<const float*>(scale.data));
  } else {
    with_model_type(out.dtype, [&](auto type) {
      using T = decltype(type);
      store_row<T>(static_cast<typename T::Element*>(out.data) + index * width, row, width);
    });
  }
}

}  // namespace LLMCTL_ISA
}  // namespace llmctl

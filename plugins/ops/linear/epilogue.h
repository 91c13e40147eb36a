// What ends a product: scale, bias and the one rounding of float32 sums.
#pragma once

#include "../../backends/cpu/rows.h"

namespace llmctl {
namespace LLMCTL_ISA {
namespace {

// Scales and bias are absent (data == nullptr), or of all columns of `out`; x_scale has one element
// or one a row.
struct Epilogue {
  const TensorRef &weight_scale, &x_scale, &bias, &out;
  float unit;  // of the sums

  // sums [columns] of row m, for the columns from `first`.
  void finish(const float* sums, int64_t m, int64_t first, int64_t columns) const {
    const auto* of_column = static_cast<const float*>(weight_scale.data);
    const bool is_scaled = x_scale.data != nullptr || of_column != nullptr;
    float of_row = 1.0f;
    if (x_scale.data != nullptr) {
      of_row = static_cast<const float*>(x_scale.data)[x_scale.shape[0] > 1 ? m : 0];
    }
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t left = columns - c;
      V y = load_some<F32>(sums + c, left) * set(unit);
      if (is_scaled) {
        V scale = set(of_row);
        if (of_column != nullptr) scale = scale * load_some<F32>(of_column + first + c, left);
        y = y * scale;
      }
      if (bias.data != nullptr) {
        with_model_type(bias.dtype, [&](auto type) {
          using B = decltype(type);
          const auto* added = static_cast<const typename B::Element*>(bias.data);
          y = y + load_some<B>(added + first + c, left);
        });
      }
      with_model_type(out.dtype, [&](auto type) {
        using T = decltype(type);
        auto* to = static_cast<typename T::Element*>(out.data);
        store_some<T>(to + m * out.shape[1] + first + c, y, left);
      });
    }
  }
};

}  // namespace
}  // namespace LLMCTL_ISA
}  // namespace llmctl

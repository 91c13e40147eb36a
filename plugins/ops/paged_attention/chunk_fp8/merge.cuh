// What chunk_fp8.cu has merged of a row's work items. Sums are in shared memory, for registers do not suffice.
#pragma once

#include "ops/paged_attention/chunk_fp8/products.cuh"

constexpr int MERGED_BYTES = 64 * SIZE * 4;  // of a warpgroup
constexpr int MERGED_STEP = 128 * 16;        // from a thread's four sums to its next four

struct Merged {
  float base[2], total[2];
  u32 at;  // of the thread's first four sums
  bool is_empty;

  DEVICE void clear() {
    is_empty = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = minus_infinity(), total[r] = 0.0f;
  }
  // Appends a work item with this base and sum of weights; of the last one the merged sums stay in `its`.
  DEVICE void append(Fp8State& its, const float (&its_base)[2], const float (&its_total)[2], bool is_last) {
    float left[2], right[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = fmaxf(base[r], its_base[r]), from = finite(top);
      left[r] = exp2(__fsub_rn(base[r], from));
      right[r] = exp2(__fsub_rn(its_base[r], from));
      total[r] = __fmaf_rn(total[r], left[r], __fmul_rn(its_total[r], right[r]));
      base[r] = top;
    }
#pragma unroll
    for (int i = 0; i < SIZE / 2; i += 4) {
      const u32 place = at + i / 4 * MERGED_STEP;
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (!is_empty) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(place)
                     : "memory");
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[k] = __fmaf_rn(x[k], left[k / 2], __fmul_rn(its.sums[i + k], right[k / 2]));
      }
      if (is_last) {
#pragma unroll
        for (int k = 0; k < 4; ++k) its.sums[i + k] = x[k];
      } else {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                     "f"(x[3])
                     : "memory");
      }
    }
    is_empty = false;
  }
};

DEVICE void append(Merged& all, Fp8State& unit, const Fp8State::Weighed& weighed) {
  const float total[2] = {unit.total(0), unit.total(1)};
  all.append(unit, weighed.base, total, false);
}

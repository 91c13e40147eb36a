// The state of a work item (`unit`) in a warp of batch.cu, and how a tile is added to it.
#pragma once

#include "ops/paged_attention/batch/warp.cuh"

// A work item, or what has been merged so far. Sums 0 and 2 of a block are of column 2 (lane % 4), 1 and 3 of
// the next; `largest` is of both, `total` of the one of them that the lane sums up.
template <int N, int C = COLUMN_BLOCKS>
struct StateOf {  // N blocks of 16 dimensions, C of 8 columns
  float largest[C][2], total[C];
  SumsOf<N, C> sums;

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < C; ++n) {
      largest[n][0] = largest[n][1] = minus_infinity(), total[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < N * 4; ++i) sums[n][i / 4][i % 4] = 0.0f;
    }
  }

  // Appends the next work item to the right.
  DEVICE void append(const StateOf& unit) {
    const bool is_odd = lane_id() & 4;
#pragma unroll
    for (int n = 0; n < C; ++n) {
      float left[2], right[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float top = fmaxf(largest[n][c], unit.largest[n][c]), base = finite(top);
        left[c] = exp2(__fsub_rn(largest[n][c], base));
        right[c] = exp2(__fsub_rn(unit.largest[n][c], base));
        largest[n][c] = top;
      }
      total[n] = __fmaf_rn(total[n], is_odd ? left[1] : left[0],
                           __fmul_rn(unit.total[n], is_odd ? right[1] : right[0]));
#pragma unroll
      for (int i = 0; i < N * 4; ++i) {
        float& x = sums[n][i / 4][i % 4];
        x = __fmaf_rn(x, left[i % 2], __fmul_rn(unit.sums[n][i / 4][i % 4], right[i % 2]));
      }
    }
  }

  static constexpr int FLOATS = C * (N * 4 + 3);  // per lane

  // The whole state in lane order, 32 values per line.
  template <class Use>
  DEVICE void each(const Use& use) {
#pragma unroll
    for (int n = 0; n < C; ++n) {
      const int first = n * (N * 4 + 3);
#pragma unroll
      for (int i = 0; i < N * 4; ++i) use(sums[n][i / 4][i % 4], first + i);
      use(largest[n][0], first + N * 4), use(largest[n][1], first + N * 4 + 1);
      use(total[n], first + N * 4 + 2);
    }
  }
  DEVICE void load(const float* from) {
    const float* own = from + lane_id();
    each([&](float& x, int i) { x = __ldcg(own + i * 32); });
  }
  // L2 keeps it until it is merged.
  DEVICE void store(float* to) {
    float* own = to + lane_id();
    each([&](float& x, int i) {
      asm volatile("st.global.cg.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(own + i * 32), "f"(x),
                   "l"(EVICT_LAST)
                   : "memory");
    });
  }
};
typedef StateOf<STEPS> State;

// Converts logits to weights, and rescales earlier sums to the same base. last[n][c]: the last key of the
// tile that a column sees.
template <int N, int C>
DEVICE void soften(StateOf<N, C>& state, LogitsOf<BLOCKS, C>& logits,
                   u32 (&weights)[C][BLOCKS][2], const int (&last)[C][2], float scale,
                   bool is_masked, bool is_first) {
  const int key = lane_id() / 4;
  const bool is_odd = lane_id() & 4;
#pragma unroll
  for (int n = 0; n < C; ++n) {
    if (is_masked) {
#pragma unroll
      for (int i = 0; i < BLOCKS * 4; ++i) {
        float& x = logits[n][i / 4][i % 4];
        x = 16 * (i / 4) + i % 4 / 2 * 8 + key <= last[n][i % 2] ? x : minus_infinity();
      }
    }
    float fade[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = fmaxf(logits[n][0][c], logits[n][0][c + 2]);
#pragma unroll
      for (int b = 1; b < BLOCKS; ++b) {
        top = fmaxf(top, fmaxf(logits[n][b][c], logits[n][b][c + 2]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      top = fmaxf(state.largest[n][c], __fmul_rn(top, scale));
      const float base = finite(top);
#pragma unroll
      for (int i = 0; i < BLOCKS * 2; ++i) {
        float& x = logits[n][i / 2][i % 2 * 2 + c];
        x = exp2(__fmaf_rn(x, scale, -base));
      }
      fade[c] = exp2(__fsub_rn(state.largest[n][c], base));
      state.largest[n][c] = top;
    }
    // A row's sum: ascending pairs of keys 8 apart, then pairs 4 and 2 keys away. Lanes of even
    // keys take the first column and get the odd keys' weights of it, the others the second.
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i) {
      const float first = logits[n][i / 2][i % 2 * 2], second = logits[n][i / 2][i % 2 * 2 + 1];
      const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
      const float even = is_odd ? other : first, odd = is_odd ? second : other;
      sum = __fadd_rn(i == 0 ? even : __fadd_rn(sum, even), odd);
      weights[n][i / 2][i % 2] = transpose(Inner::pack_pair(first, second));
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
    state.total[n] = __fmaf_rn(state.total[n], is_odd ? fade[1] : fade[0], sum);
    if (is_first) continue;  // there is nothing to rescale
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      float& x = state.sums[n][i / 4][i % 4];
      x = __fmul_rn(x, fade[i % 2]);
    }
  }
}

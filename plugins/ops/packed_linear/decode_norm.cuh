// How the kernel for few tokens gets its tokens: copied by the copying warp or, with NORM, added to their
// residual, normalized, quantized and written to shared memory by the multiplying warps themselves.
// Doing this in every block takes less time than a separate kernel in the chain of a step.
//
// The bits are those of plugins/ops/rms_norm/triton_kernel.py, whose warps hold 256 adjacent
// elements and whose threads hold 8: a thread's squares are added in order, then lanes and then warps by
// butterfly shuffles. Here one warp computes the part of several of those. Only latency matters, so
// additional warps that do not multiply share the work.
//
// Macros with NORM: HIDDEN (a multiple of 256 * NORM_WARPS), NORM_WARPS (4, plus helping warps).
#pragma once

#include "ops/packed_linear/decode_ring.cuh"
#if NORM
#include "backends/cuda/sm90/norm_math.cuh"
#endif

// A barrier for the multiplying warps alone.
DEVICE void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

#if !NORM

#define TOKEN_PARAMETERS const __grid_constant__ TensorMap x
constexpr int HELPERS = FILL > 0 ? 32 : 0, UNITS = 0;  // threads

struct Tokens {
  template <class Arrived>
  DEVICE void wait(const Shared&, const Walk&, const Arrived& arrived) const {
    wait_for_dependencies();
    arrived();
  }
};

#else

#define TOKEN_PARAMETERS                                                                      \
  const uint4 *delta, const uint4 *residual, uint4 *residual_out, const uint4 *norm_weight, \
      float epsilon

constexpr int HELPERS = 32 * (NORM_WARPS - 4);  // threads that normalize and do not multiply
constexpr int UNIT = 8;                         // adjacent elements of a thread
constexpr int PARTS = HIDDEN / (32 * UNIT);     // sums of 256 elements
constexpr int UNITS = PARTS / NORM_WARPS;       // of each thread
static_assert(HIDDEN % (32 * UNIT) == 0 && PARTS <= 32 && PARTS % NORM_WARPS == 0, "whole units");

struct Tokens {
  const uint4* delta;
  const uint4* residual;
  uint4* residual_out;  // null: not needed
  float epsilon;
  int tokens;
  Divisor divisor;
  uint4 factors[UNITS];

  DEVICE Tokens(const uint4* delta_, const uint4* residual_, uint4* residual_out_,
                const uint4* weights, float epsilon_, const float* scale, int tokens_)
      : delta(delta_), residual(residual_), residual_out(residual_out_), epsilon(epsilon_),
        tokens(tokens_), divisor(IS_FP8 ? __ldg(scale) : 1.0f) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i) factors[i] = __ldg(weights + unit(i));
  }

  static DEVICE int part(int i) {  // the copying warp is between the multiplying and the helping warps
    const int warp = threadIdx.x / 32;
    return NORM_WARPS * i + warp - (warp >= THREADS / 32);
  }
  static DEVICE void meet() { asm volatile("bar.sync 2, %0;" ::"n"(32 * NORM_WARPS) : "memory"); }
  static DEVICE int unit(int i) { return 32 * part(i) + threadIdx.x % 32; }

  // Stores eight elements in the operand that `start_slot` reads.
  DEVICE void write(const Shared& shared, int token, int i, const uint4& y) const {
    const int byte = unit(i) * UNIT * INPUT_TYPE::bytes;
    const u32 to = shared.tokens + byte / 128 * X_BYTES + token * 128 +
                   (byte / 16 % 8 ^ token % 8) * 16 + byte % 16;
    if constexpr (IS_FP8) {
      const uint2 packed = divisor.unit(y);
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(packed.x), "r"(packed.y)
                   : "memory");
    } else {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(y.x), "r"(y.y),
                   "r"(y.z), "r"(y.w)
                   : "memory");
    }
  }

  // This thread's part of a token's row, with the residual added.
  DEVICE void load(int token, uint4 (&h)[UNITS]) const {
    const int first = token * (HIDDEN / UNIT);
    uint4 added[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      h[i] = __ldcg(delta + first + unit(i));
      added[i] = __ldcg(residual + first + unit(i));
    }
#pragma unroll
    for (int i = 0; i < UNITS; ++i) h[i] = add_units(h[i], added[i]);
  }

  // 1 / sqrt(mean square + epsilon) of the row; `squares` is room for its parts.
  DEVICE float inverse_rms(u32 squares, const uint4 (&h)[UNITS]) const {
    float sums[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) sums[i] = square_sum(h[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(~0u, sums[i], step));
      }
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + part(i) * 4), "f"(sums[i])
                     : "memory");
      }
    }
    meet();
    return inverse_rms_of(squares, epsilon);
  }

  // Waits for the predecessor; then all tokens are ready for every multiplying warp. Only the
  // chunks are written that this block multiplies, and only the first block stores the sums.
  template <class Arrived>
  DEVICE void wait(const Shared& shared, const Walk& walk, const Arrived& arrived) const {
    wait_for_dependencies();
    arrived();
#pragma unroll 1  // mostly one iteration, and fetching more instructions takes time
    for (int t = 0; t < tokens; ++t) {
      uint4 h[UNITS];
      load(t, h);
      const float inverse = inverse_rms(shared.squares + t % 2 * 128, h);
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        const int chunk = part(i) * (32 * UNIT / ELEMENTS);
        if (SPLIT > 1 && (chunk < walk.first || chunk >= walk.last)) continue;
        write(shared, t, i, normal_unit(h[i], factors[i], inverse));
      }
      if (blockIdx.x == 0 && residual_out) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) residual_out[t * (HIDDEN / UNIT) + unit(i)] = h[i];
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // so that wgmma sees the stores
    if (threadIdx.x < CONSUMERS) {
      meet();
    } else {
      asm volatile("bar.arrive 2, %0;" ::"n"(32 * NORM_WARPS) : "memory");
    }
  }
};

#endif

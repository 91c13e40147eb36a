// Tokens of the kernel for few tokens: copied by the copying warp, or, with NORM, added to their
// residual, normalized, quantized and written to shared memory by the multiplying warps themselves.
// A row that every block reads costs less than a kernel of its own in the chain of a step.
//
// The bits are those of plugins/rms_norm/triton_kernel.py, whose warps hold 256 neighbouring
// elements and whose threads 8: a thread's squares are added in order, then lanes and then warps by
// butterflies. Here a warp takes the part of several of those. Latency is all that counts, so more
// warps than multiply share the work.
//
// Macros with NORM: HIDDEN (a multiple of 256 * NORM_WARPS), NORM_WARPS (4, and those that help).
#pragma once

#include "packed_linear/decode_ring.cuh"

// Meeting of the multiplying warps alone.
DEVICE void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

#if !NORM

#define TOKEN_PARAMETERS const __grid_constant__ TensorMap x
constexpr int HELPERS = 0, UNITS = 0;

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
constexpr int UNIT = 8;                         // elements of a thread that lie side by side
constexpr int PARTS = HIDDEN / (32 * UNIT);     // sums of 256 elements
constexpr int UNITS = PARTS / NORM_WARPS;       // of each thread
constexpr int FIRST_STEP = PARTS > 16 ? 16 : PARTS > 8 ? 8 : PARTS > 4 ? 4 : 2;  // over parts
static_assert(HIDDEN % (32 * UNIT) == 0 && PARTS <= 32 && PARTS % NORM_WARPS == 0, "whole units");

template <class Type>
struct Pairs;  // arithmetic on two elements of the model type, each rounded once

#define PAIRS(TYPE, NAME)                                                            \
  template <>                                                                        \
  struct Pairs<TYPE> {                                                               \
    static DEVICE u32 add(u32 a, u32 b) {                                            \
      u32 y;                                                                         \
      asm("add.rn." NAME " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));                 \
      return y;                                                                      \
    }                                                                                \
    static DEVICE u32 multiply(u32 a, u32 b) {                                       \
      u32 y;                                                                         \
      asm("mul.rn." NAME " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));                 \
      return y;                                                                      \
    }                                                                                \
    static DEVICE u32 clamp(u32 a, u32 bound) { /* NaN stays NaN */                  \
      u32 y;                                                                         \
      asm("min.NaN." NAME " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(bound));            \
      asm("max.NaN." NAME " %0, %0, %1;" : "+r"(y) : "r"(bound ^ 0x80008000u));      \
      return y;                                                                      \
    }                                                                                \
    static DEVICE u32 pack(float a) { return TYPE::pack(a); }                        \
    static DEVICE float low(u32 a) { return TYPE::unpack(u16(a)); }                  \
    static DEVICE float high(u32 a) { return TYPE::unpack(u16(a >> 16)); }           \
  };
PAIRS(BF16, "bf16x2")
PAIRS(FP16, "f16x2")
typedef Pairs<MODEL_TYPE> Model;

// y / scale for FP8, rounded to nearest: one residual correction of the product with the rounded
// reciprocal, without a branch for each element. Values are first bounded where they saturate
// anyway, because infinities have no residual. Scales near the ends of float32's range, and NaN,
// divide truly.
struct Divisor {
  float scale, inverse;
  u32 bound;  // two copies

  DEVICE explicit Divisor(float scale_) : scale(scale_) {
    const bool is_plain = scale > 0x1p-80f && scale < 0x1p80f;
    inverse = is_plain ? __frcp_rn(scale) : 0.0f;
    bound = Model::pack(1024.0f * scale) * 0x10001u;
  }
  DEVICE u32 pair(u32 y) const {
    const u32 bounded = Model::clamp(y, bound);
    return E4M3::pack_pair(quotient(Model::low(bounded)), quotient(Model::high(bounded)));
  }
  DEVICE uint2 unit(const uint4& y) const {
    if (inverse == 0.0f) return divide_truly(y, scale);
    return {pair(y.x) | pair(y.y) << 16, pair(y.z) | pair(y.w) << 16};
  }

 private:
  DEVICE float quotient(float x) const {
    const float rough = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-rough, scale, x), inverse, rough);
  }
  static __device__ __noinline__ uint2 divide_truly(const uint4 y, float scale) {
    const u32 pairs[4] = {y.x, y.y, y.z, y.w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = E4M3::pack_pair(__fdiv_rn(Model::low(pairs[i]), scale),
                               __fdiv_rn(Model::high(pairs[i]), scale));
    }
    return {out[0] | out[1] << 16, out[2] | out[3] << 16};
  }
};

// sum / HIDDEN, rounded to nearest.
DEVICE float mean(float sum) {
  constexpr float INVERSE = 1.0f / HIDDEN;
  const float rough = __fmul_rn(sum, INVERSE);
  if constexpr ((HIDDEN & (HIDDEN - 1)) == 0) return rough;
  const float exact = __fmaf_rn(__fmaf_rn(-rough, float(HIDDEN), sum), INVERSE, rough);
  return sum > 0x1p-80f && sum < 0x1p120f ? exact : __fdiv_rn(sum, float(HIDDEN));
}

struct Tokens {
  const uint4* delta;
  const uint4* residual;
  uint4* residual_out;  // null: nobody needs it
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

  static DEVICE int part(int i) {  // the copying warp lies between the multiplying ones and helpers
    const int warp = threadIdx.x / 32;
    return NORM_WARPS * i + warp - (warp >= THREADS / 32);
  }
  static DEVICE void meet() { asm volatile("bar.sync 2, %0;" ::"n"(32 * NORM_WARPS) : "memory"); }
  static DEVICE int unit(int i) { return 32 * part(i) + threadIdx.x % 32; }

  static DEVICE float square_sum(const uint4& h) {
    const float first = Model::low(h.x), second = Model::high(h.x);
    float sum = __fmaf_rn(first, first, __fmul_rn(second, second));
    const u32 rest[3] = {h.y, h.z, h.w};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      sum = __fmaf_rn(Model::low(rest[i]), Model::low(rest[i]), sum);
      sum = __fmaf_rn(Model::high(rest[i]), Model::high(rest[i]), sum);
    }
    return sum;
  }

  DEVICE u32 normal_pair(u32 h, u32 factor, float inverse) const {
    const u32 normal = MODEL_TYPE::pack_pair(__fmul_rn(Model::low(h), inverse),
                                             __fmul_rn(Model::high(h), inverse));
    return Model::multiply(normal, factor);
  }

  // Eight elements as the operand that `start_slot` reads.
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

  // This thread's part of a token's row, the residual added.
  DEVICE void load(int token, uint4 (&h)[UNITS]) const {
    const int first = token * (HIDDEN / UNIT);
    uint4 added[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      h[i] = __ldcg(delta + first + unit(i));
      added[i] = __ldcg(residual + first + unit(i));
    }
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      h[i] = {Model::add(h[i].x, added[i].x), Model::add(h[i].y, added[i].y),
              Model::add(h[i].z, added[i].z), Model::add(h[i].w, added[i].w)};
    }
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
    const int lane = threadIdx.x % (2 * FIRST_STEP);
    float sum;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(squares + lane * 4) : "memory");
    if (PARTS < 2 * FIRST_STEP && lane >= PARTS) sum = 0.0f;
#pragma unroll
    for (int step = FIRST_STEP; step > 0; step /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    }
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(mean(sum), epsilon)));
    return inverse;
  }

  // Waits for the predecessor; then all tokens are ready for every multiplying warp. Only the
  // chunks are written that this block multiplies, and only the first block stores the sums.
  template <class Arrived>
  DEVICE void wait(const Shared& shared, const Walk& walk, const Arrived& arrived) const {
    wait_for_dependencies();
    arrived();
#pragma unroll 1  // once is the rule, and instructions that are far away take time too
    for (int t = 0; t < tokens; ++t) {
      uint4 h[UNITS];
      load(t, h);
      const float inverse = inverse_rms(shared.squares + t % 2 * 128, h);
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        const int chunk = part(i) * (32 * UNIT / ELEMENTS);
        if (SPLIT > 1 && (chunk < walk.first || chunk >= walk.last)) continue;
        const uint4 &a = h[i], &f = factors[i];
        write(shared, t, i, {normal_pair(a.x, f.x, inverse), normal_pair(a.y, f.y, inverse),
                             normal_pair(a.z, f.z, inverse), normal_pair(a.w, f.w, inverse)});
      }
      if (blockIdx.x == 0 && residual_out) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) residual_out[t * (HIDDEN / UNIT) + unit(i)] = h[i];
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was stored
    if (threadIdx.x < CONSUMERS) {
      meet();
    } else {
      asm volatile("bar.arrive 2, %0;" ::"n"(32 * NORM_WARPS) : "memory");
    }
  }
};

#endif

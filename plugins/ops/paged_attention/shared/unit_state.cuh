// The state of a work item (`unit`) in generation.cu and chunk.cu, and how a tile is added to it.
#pragma once

#include "ops/paged_attention/shared/operands.cuh"

// ---- products: left operand in shared memory (logits) or in registers (values, and logits in long.cu) ----

// d[64 x 64] = (add ? d : 0) + a[64 x 16] b[64 x 16]^T; d[64 x N] += a[64 x 16] b[16 x N].
template <class Type>
struct Attention;

#define REGISTER_PRODUCT(NAME, N, TYPES, TRANSPOSED, LIST, A0, A1, A2, A3, B, P, ...)            \
  static DEVICE void NAME(float (&d)[N / 2], const u32* a, u64 b, int add) {                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32" TYPES " {" LIST "}, {%" #A0  \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, " #TRANSPOSED ";\n}"      \
                 : __VA_ARGS__                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));             \
  }
#define SHARED_PRODUCT(NAME, N, TYPES, LIST, A, B, P, ...)                                      \
  static DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, int add) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32" TYPES " {" LIST "}, %" #A    \
                 ", %" #B ", p, 1, 1, 0, 0;\n}"                                               \
                 : __VA_ARGS__                                                               \
                 : "l"(a), "l"(b), "r"(add));                                                 \
  }
#define ATTENTION(TYPE, TYPES)                                                                 \
  template <>                                                                                  \
  struct Attention<TYPE> {                                                                     \
    SHARED_PRODUCT(logits, 64, TYPES, I32, 32, 33, 34, D32(0))                                  \
    REGISTER_PRODUCT(logits, 64, TYPES, 0, I32, 32, 33, 34, 35, 36, 37, D32(0))                 \
    REGISTER_PRODUCT(values, 64, TYPES, 1, I32, 32, 33, 34, 35, 36, 37, D32(0))                 \
    REGISTER_PRODUCT(values, 128, TYPES, 1, I64, 64, 65, 66, 67, 68, 69, D64(0))                \
  };
ATTENTION(BF16, ".bf16.bf16")
ATTENTION(FP16, ".f16.f16")

// Here rows of 128 bytes are keys, and the product runs along them: HALVES operands side by side.
DEVICE u64 transposed_operand(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | (u64(HALF_BYTES >> 4) << 16) | (u64(1024 >> 4) << 32) |
         (u64(1) << 62);
}

// ---- the state of a work item ----

struct State {
  static constexpr int LOGITS = KEYS / 2, WORDS = KEYS / 4;  // of a tile and of its weights, a thread
  float largest[2], total[2];
  float acc[OWN_SIZE / 2];

  // What is known of it once its last tile has weights; their product with values may be on its way.
  struct Weighed {
    float largest[2], total[2];
  };
  DEVICE Weighed weighed() const { return {{largest[0], largest[1]}, {total[0], total[1]}}; }
  DEVICE void hold() { keep_order(acc); }
  DEVICE void hold_before_logits() {}
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < OWN_SIZE / 2; ++i) acc[i] = 0.0f;
    clear_states();
  }
  DEVICE void clear_states() {
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = minus_infinity(), total[r] = 0.0f;
  }
};

// The largest of the four threads that have a row, of each of their two rows.
DEVICE void share_largest(float (&top)[2]) {
#pragma unroll
  for (int lanes = 2; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], lanes));
  }
}

// How a tile is added to a work item, for each of a thread's rows.
struct Softening {
  float base[2];  // of the exponents
  float fade[2];  // factor for earlier sums
  float sum[2];   // of the thread's weights

  // MASKED: columns of the tile after the row's `seen` are not visible.
  template <bool MASKED>
  DEVICE void find_base(State& state, float (&s)[32], const int (&seen)[2], float scale) {
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = seen[r] - 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; MASKED && j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = 8 * j + e <= last ? x : minus_infinity();
        }
      }
      top[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) {
        top[r] = fmaxf(top[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      }
    }
    share_largest(top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(state.largest[r], __fmul_rn(top[r], scale));
      base[r] = finite(top[r]);
      fade[r] = exp2(__fsub_rn(state.largest[r], base[r]));
      state.largest[r] = top[r];
    }
  }
  DEVICE void weigh(const State&, const float (&s)[32], u32 (&weights)[16], float scale) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = exp2(__fmaf_rn(s[4 * j + 2 * r], scale, -base[r]));
        const float b = exp2(__fmaf_rn(s[4 * j + 2 * r + 1], scale, -base[r]));
        sum[r] = __fadd_rn(j == 0 ? a : __fadd_rn(sum[r], a), b);
        weights[2 * j + r] = Inner::pack_pair(a, b);
      }
    }
  }
  DEVICE void fade_values(State& state) const {
#pragma unroll
    for (int i = 0; i < OWN_SIZE / 2; ++i) state.acc[i] = __fmul_rn(state.acc[i], fade[i / 2 % 2]);
  }
  DEVICE void add_weights(State& state) {
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(~0u, sum[r], lanes));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.total[r] = __fmaf_rn(state.total[r], fade[r], sum[r]);
  }
};

DEVICE void start_logits(float (&s)[32], u32 queries, u32 keys) {
  const u64 a = operand(queries), b = operand(keys);
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int at = i / 4 * (HALF_BYTES / 16) + i % 4 * 2;
    Attention<Inner>::logits(s, a + at, b + at, i > 0);
  }
  product_commit();
}

// Queries in registers: of each step what a thread holds of a left operand.
DEVICE void start_logits(float (&s)[32], const u32 (&queries)[STEPS][4], u32 keys) {
  const u64 b = operand(keys);
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    Attention<Inner>::logits(s, queries[i], b + i / 4 * (HALF_BYTES / 16) + i % 4 * 2, i > 0);
  }
  product_commit();
}

DEVICE void start_values(State& state, const u32 (&weights)[16], u32 values, bool add = true) {
  const u64 b = transposed_operand(values);
  keep_order(state.acc);
  product_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Attention<Inner>::values(state.acc, weights + 4 * i, b + i * (2048 / 16), i > 0 || add);
  }
  product_commit();
}

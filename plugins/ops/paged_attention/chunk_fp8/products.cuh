// FP8 products of attention (reference.py has the arithmetic): what a thread holds of queries, logits, softmax weights and
// sums, and how a tile of keys is added to a work item. A warpgroup has 64 rows, a thread has parts of two of them.
#pragma once

#include "backends/cuda/sm90/held_product.cuh"
#include "ops/paged_attention/chunk/rows.cuh"
#include "ops/paged_attention/chunk_fp8/raising.cuh"

HELD_PRODUCT(128, I64, 64, 65, 66, 67, 68, 69, D64(0))
HELD_PRODUCT(136, I64 ", %64, %65, %66, %67", 68, 69, 70, 71, 72, 73, D64(0), D4(64))

constexpr int DEEP = SIZE / 32;     // products along the head dimension
constexpr int SUMS = SIZE / 2 + 4;  // of weighted values, a thread; the last four are of ones, or of nothing
static_assert(KEYS == 128 && SIZE == 128, "keys and dimensions are rows of 128 bytes");

// Queries of a thread's two rows, and the power of two that each row was divided by.
struct Queries {
  u32 words[DEEP][4];
  float unit[2];

  DEVICE void load(const MODEL_TYPE::Storage* q, const volatile Item& item) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(r), item.rows - 1);
      const long long token = item.token + row / GROUP;
      const MODEL_TYPE::Storage* from =
          q + ((token * HEADS + item.head) * GROUP + row % GROUP) * SIZE + 4 * (threadIdx.x % 4);
      uint2 x[2 * DEEP];  // four numbers of each sixteen
#pragma unroll
      for (int i = 0; i < 2 * DEEP; ++i) {
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x[i].x), "=r"(x[i].y)
                     : "l"(from + 16 * i));
      }
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * DEEP; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) most = fmaxf(most, fabsf(part(x[i], k)));
      }
#pragma unroll
      for (int lanes = 2; lanes > 0; lanes /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
      }
      // The exponent of the least power of two times 1.75 that is no less; 448 is 1.75 times 2^8.
      const u32 bits = __float_as_uint(fminf(fmaxf(most, 0x1p-100f), 0x1p126f));
      const u32 power = (bits + 0x1FFFFF) >> 23;
      const float factor = __uint_as_float((262 - power) << 23);
      unit[r] = __uint_as_float((power - 8) << 23);
#pragma unroll
      for (int i = 0; i < 2 * DEEP; ++i) {
        words[i / 2][r + i % 2 * 2] = pack(__fmul_rn(part(x[i], 0), factor), __fmul_rn(part(x[i], 1), factor),
                                           __fmul_rn(part(x[i], 2), factor), __fmul_rn(part(x[i], 3), factor));
      }
    }
  }
  static DEVICE u32 pack(float a, float b, float c, float d) {
    return E4M3::pack_pair(a, b) | u32(E4M3::pack_pair(c, d)) << 16;
  }
  static DEVICE float part(const uint2& x, int k) {
    const u32 pair = k < 2 ? x.x : x.y;
    return MODEL_TYPE::unpack(u16(k % 2 ? pair >> 16 : pair));
  }
};

// A work item: what exponents of its weights are relative to, and sums of weighted values and of weights.
struct Fp8State {
  static constexpr int LOGITS = KEYS / 2, WORDS = KEYS / 8;  // of a tile and of its weights, a thread
  float base[2];
  bool is_told;  // by weights, whether one of the warp's bases has to be raised
  float sums[SUMS];

  struct Weighed {
    float base[2];
  };
  DEVICE Weighed weighed() const { return {{base[0], base[1]}}; }
  DEVICE void clear_states() {
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = minus_infinity();
    is_told = false;
  }
  // All arithmetic with sums is before the next products, or these would wait for each other.
  DEVICE void hold_before_logits() { keep_order(sums); }
  DEVICE void hold() { keep_order(sums); }

  // The sum of weights of row r; the first thread of four has it.
  DEVICE float total(int r) const {
    return __shfl_sync(~0u, sums[SIZE / 2 + 2 * r], threadIdx.x & 28);
  }
};

// How a tile is added to a work item, for each of a thread's rows.
struct Fp8Softening {
  float from[2];  // what is subtracted from logits
  float fade[2];  // factor for earlier sums
  bool fades;     // whether it is another than one for any of the warp's rows

  // MASKED: columns of the tile after the row's `seen` are not visible. If weights will tell whether a base is too low, it is not
  // compared with logits before.
  template <bool MASKED>
  DEVICE void find_base(Fp8State& state, float (&s)[Fp8State::LOGITS], const int (&seen)[2], const float (&scale)[2]) {
#pragma unroll
    for (int r = 0; MASKED && r < 2; ++r) {
      const int last = seen[r] - 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = 8 * j + e <= last ? x : minus_infinity();
        }
      }
    }
    if (state.is_told) {
      keep(state);
    } else {
      compare(state, s, scale);
    }
  }
  DEVICE void keep(const Fp8State& state) {
    fades = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) from[r] = finite(state.base[r]);
  }
  DEVICE void compare(Fp8State& state, const float (&s)[Fp8State::LOGITS], const float (&scale)[2]) {
    float top[2];
    fades = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float two[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
      for (int j = 1; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) two[e] = fmaxf(two[e], s[4 * j + 2 * r + e]);
      }
      top[r] = fmaxf(two[0], two[1]);
      fades = fades || passes(state, r, __fmul_rn(top[r], scale[r]));
    }
    fades = __any_sync(~0u, fades);  // a row's largest logit may be another thread's
    if (!fades) return keep(state);
    share_largest(top);
    bool is_near = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = __fmul_rn(top[r], scale[r]);
      const float base = passes(state, r, top[r]) ? top[r] : state.base[r];
      from[r] = finite(base);
      fade[r] = exp2(__fsub_rn(state.base[r], from[r]));
      state.base[r] = base;
      is_near = is_near && fabsf(base) < FAR_BASE;
    }
    state.is_told = __all_sync(~0u, is_near);
  }
  static DEVICE bool passes(const Fp8State& state, int r, float logit) {
    return logit > __fadd_rn(state.base[r], RAISE);
  }
  // Weights in E4M3. Where products have a row's keys 8 j + 2 t and the next in thread t of four, left operands want
  // four in a row, so images_fp8.cu stores values in that order. Where weights tell that a base is too low, once more.
  DEVICE void weigh(Fp8State& state, const float (&s)[Fp8State::LOGITS], u32 (&weights)[Fp8State::WORDS],
                    const float (&scale)[2]) {
    bool asks = state.is_told;
#pragma unroll 1
    do {
      const float shift[2] = {__fsub_rn(WEIGHT_POWER, from[0]), __fsub_rn(WEIGHT_POWER, from[1])};
      Raising raising;
#pragma unroll
      for (int j = 0; j < KEYS / 8; j += 2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto weight = [&](int i) { return exp2(__fmaf_rn(s[4 * j + 2 * r + i], scale[r], shift[r])); };
          u32& four = weights[j / 4 * 4 + j / 2 % 2 * 2 + r];
          four = Queries::pack(weight(0), weight(1), weight(4), weight(5));
          raising.note(four);
        }
      }
      if (!asks || !__any_sync(~0u, raising.any())) return;
      asks = false;
      compare(state, s, scale);
    } while (fades);
  }
  DEVICE void add_weights(Fp8State&) const {}  // a product with ones does
  DEVICE void fade_values(Fp8State& state) const {
    if (!fades) return;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) state.sums[i] = __fmul_rn(state.sums[i], fade[i / 2 % 2]);
  }
};

DEVICE void start_logits(float (&s)[Fp8State::LOGITS], const Queries& queries, u32 keys) {
  const u64 b = operand(keys);
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < DEEP; ++i) HeldProduct<KEYS>::add(s, queries.words[i], b + 2 * i, i > 0);
  product_commit();
}

DEVICE void start_values(Fp8State& state, const u32 (&weights)[Fp8State::WORDS], u32 values, bool add) {
  const u64 b = operand(values);
  keep_order(state.sums);
  product_fence();
#pragma unroll
  for (int i = 0; i < KEYS / 32; ++i) HeldProduct<SIZE + 8>::add(state.sums, weights + 4 * i, b + 2 * i, i > 0 || add);
  product_commit();
}

// How every block loads the tokens of a product into shared memory: unchanged, or with the residual added,
// normalized and quantized (the bits of decode_norm.cuh).
//
// With ring units of n intervals, interval i of token t is row i % n + n t of the operand: the products of n
// intervals are computed side by side, each in its own columns.
#pragma once

#include "fused/decoder_layers/landing.cuh"

// The address of the 16 bytes that contain byte `at` of a token of product S.
template <class S>
DEVICE u32 token_place(u32 tokens, int token, int at) {
  const int interval = at / INTERVAL_BYTES, chunk = at % INTERVAL_BYTES / 128, piece = at % 128 / 16;
  const int row = interval % S::UNIT_INTERVALS + S::UNIT_INTERVALS * token;
  return tokens + interval / S::UNIT_INTERVALS * S::OPERAND_BYTES +
         (chunk * S::OPERAND_ROWS + row) * 128 + ((piece ^ row % 8) << 4);
}

// Zeros in the columns of the operand that no interval has. Nobody uses their sums, but products of zeros take less power
// than those of the keys and values that lay there. They stay while products have the same place for their tokens, up to
// the next layer's attention.
template <class S>
DEVICE void clear_idle_columns(const Shared& shared) {
  constexpr int USED = S::UNIT_INTERVALS * TOKENS, ROW_PIECES = (S::OPERAND_ROWS - USED) * 8;  // of 16 bytes, 128 bytes of K
  constexpr int PIECES = S::TOKEN_BYTES / (S::OPERAND_ROWS * 128) * ROW_PIECES, SOME = ROW_PIECES + !ROW_PIECES;
#pragma unroll
  for (int i = threadIdx.x; i < PIECES; i += COMPUTE) {
    const int block = i / SOME, piece = i % SOME;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                     shared.tokens + block * (S::OPERAND_ROWS * 128) + USED * 128 + piece * 16),
                 "r"(0)
                 : "memory");
  }
}

// so that wgmma sees the stores
template <class S>
DEVICE void tokens_are_ready() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (S::HELD_UNITS > 0) holders_meet<TOKENS_ARE_THERE>();
  else meet();
}

// Whether the addresses of tokens are computed before the tokens arrive. Those of two tokens take too many
// registers.
constexpr bool ARE_PLACES_KEPT = TOKENS == 1;

// What is not set in every branch takes registers from layer to layer: with 4-bit weights they are needed.
template <int COUNT>
DEVICE void set_if_coded(uint4 (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; MXFP4 && i < COUNT; ++i) x[i] = {0, 0, 0, 0};
}

// FP8 tokens of a product. IS_EXCHANGED: they are computed by other blocks of this launch. IS_COPIED: they are fetched,
// and `parity` is that of the barrier which tells that they came.
template <class S, bool IS_EXCHANGED, bool IS_COPIED = false>
DEVICE void bring_tokens(const Shared& shared, const Arrivals& arrivals, const u8* x, int tokens, u32 parity = 0) {
  constexpr int PIECES = S::K / 16, ROUNDS = (TOKENS * PIECES + COMPUTE - 1) / COMPUTE;
  const auto which = [&](int i) { return i * COMPUTE + int(threadIdx.x); };
  const auto has = [&](int i) { return which(i) < tokens * PIECES; };
  const auto place = [&](int i) {
    return token_place<S>(shared.tokens, which(i) / PIECES, which(i) % PIECES * 16);
  };
  uint4 held[ROUNDS];
  set_if_coded(held);
  u32 to[ROUNDS];
#pragma unroll
  for (int i = 0; ARE_PLACES_KEPT && i < ROUNDS; ++i) made(to[i] = place(i));
  const u8* from = x + threadIdx.x * 16;
  if (!IS_COPIED) made(from);
  if (IS_EXCHANGED) {
    const u8* first = from;
    if constexpr (IS_COPIED) {
      first = generic(landing<S>(shared)) + threadIdx.x * 16;
      made(first);
      barrier_wait(shared.came, parity);
    } else {
      arrivals.wait(EARLY);
    }
    take_pieces<1>(held, first, from, COMPUTE * 16, has, [&] {
      if (MXFP4 && !IS_COPIED) clear_idle_columns<S>(shared);  // no warp of the block attends any more
    });
    if (IS_COPIED && !LANDS_APART<S>) meet();
  } else {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (has(i)) held[i] = __ldcg((const uint4*)from + i * COMPUTE);
    }
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    if (!has(i)) continue;
    const u32 at = ARE_PLACES_KEPT ? to[i] : place(i);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(held[i].x),
                 "r"(held[i].y), "r"(held[i].z), "r"(held[i].w)
                 : "memory");
  }
  tokens_are_ready<S>();
}

constexpr int NORM_PARTS = HIDDEN / 256, NORM_UNITS = (NORM_PARTS + WARPS - 1) / WARPS;

// The thread's groups of a row, 8 elements each.
struct NormUnits {
  static DEVICE int part(int i) { return WARPS * i + threadIdx.x / 32; }
  static DEVICE int unit(int i) { return 32 * part(i) + threadIdx.x % 32; }
  static DEVICE bool has(int i) { return NORM_PARTS % WARPS == 0 || part(i) < NORM_PARTS; }
};

// The residual: every block adds up all of it.
struct Residual : NormUnits {
  uint4 units[TOKENS][NORM_UNITS];
  DEVICE Residual(const uint4* from, int tokens) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int i = 0; i < NORM_UNITS; ++i) {
        if (t < tokens && has(i)) units[t][i] = __ldcg(from + t * (HIDDEN / 8) + unit(i));
      }
    }
  }
};

// Adds the result of a product to the residual.
struct Norm : NormUnits {
  uint4 factors[NORM_UNITS];
  float scale;

  DEVICE Norm(const uint4* weights, const float* scale_) : scale(__ldg(scale_)) {
    set_if_coded(factors);
#pragma unroll
    for (int i = 0; i < NORM_UNITS; ++i) {
      if (!has(i)) continue;
      factors[i] = __ldg(weights + unit(i));
    }
  }

  // The sums are stored to `residual`, and to rows of `also` if it is not null: `out_row` of a token, -1 for none.
  // `parity`: as in `bring_tokens`.
  template <class S, int EARLY_BY, class OutRow, class Meanwhile>
  DEVICE void bring(const Shared& shared, const Arrivals& arrivals, const u8* delta, u32 parity, Residual& residual,
                    uint4* also, const OutRow& out_row, float epsilon, int tokens, const Meanwhile& meanwhile) {
    const auto place = [&](int t, int i) {
      const int at = anew(unit(i));
      return token_place<S>(shared.tokens, t, at * 8) + at % 2 * 8;
    };
    u32 to[NORM_UNITS];
#pragma unroll
    for (int i = 0; ARE_PLACES_KEPT && i < NORM_UNITS; ++i) made(to[i] = place(0, i));
    const u8* from = delta + unit(0) * 16;
    if (!IS_FETCHED) made(from);
    const u8* first = from;
    if constexpr (IS_FETCHED) {
      static_assert(LANDS_APART<S>, "written a token after the other");
      first = generic(landing<S>(shared)) + unit(0) * 16;
      made(first);
      barrier_wait(shared.came, parity);
    } else {
      arrivals.wait(EARLY_BY);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (t >= tokens) break;
      uint4 added[NORM_UNITS];
      set_if_coded(added);
      uint4(&h)[NORM_UNITS] = residual.units[t];
      Divisor divisor;
      const int its = t * (HIDDEN * 2);
      take_pieces<2>(added, first + its, from + its, WARPS * 32 * 16, has,
                     [&] { divisor = Divisor(scale), meanwhile(); });
      float sums[NORM_UNITS];
#pragma unroll
      for (int i = 0; i < NORM_UNITS; ++i) {
        if (!has(i)) continue;
        h[i] = add_units(added[i], h[i]);
        sums[i] = square_sum(h[i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < NORM_UNITS; ++i) {
          sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(~0u, sums[i], step));
        }
      }
      const u32 squares = shared.squares + t % 2 * 128;
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < NORM_UNITS; ++i) {
          if (!has(i)) continue;
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + part(i) * 4), "f"(sums[i])
                       : "memory");
        }
      }
      meet();
      const float inverse = inverse_rms_of(squares, epsilon);
      uint4 normal[NORM_UNITS];
      uint2 packed[NORM_UNITS];
#pragma unroll
      for (int i = 0; i < NORM_UNITS; ++i) normal[i] = normal_unit(h[i], factors[i], inverse);
      divisor.units(normal, packed);
#pragma unroll
      for (int i = 0; i < NORM_UNITS; ++i) {
        if (!has(i)) continue;
        const u32 at = ARE_PLACES_KEPT ? to[i] : place(t, i);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(packed[i].x),
                     "r"(packed[i].y)
                     : "memory");
      }
    }
    tokens_are_ready<S>();
    if (!also) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const int to = out_row(t);
#pragma unroll
      for (int i = 0; i < NORM_UNITS; ++i) {
        if (t < tokens && to >= 0 && has(i)) also[to * (HIDDEN / 8) + unit(i)] = residual.units[t][i];
      }
    }
  }
};

// The products of layers.cu. A block takes groups of 16 weight rows with all of K, so no block adds
// to another's sums: a product's 64 rows are the 16 rows at four intervals of K, and its columns the
// tokens at the same intervals. Where row and column are of one interval lies what is wanted.
#pragma once

#include "decoder_layers/input.cuh"

#define EPILOGUE 0
#define OUT_TYPE MODEL_TYPE
namespace plain_end {
#include "packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE
#define EPILOGUE 1
#define OUT_TYPE E4M3
namespace swiglu_end {
#include "packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE
#define EPILOGUE 2
#define OUT_TYPE MODEL_TYPE
namespace rope_end {
#include "packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE

// What a namespace of epilogue_values.cuh has for one product.
#define END_OF(NAME, SPACE)                                                                    \
  struct NAME {                                                                                \
    typedef SPACE::Epilogue Epilogue;                                                          \
    typedef SPACE::RowConstants Rows;                                                          \
    typedef SPACE::TokenConstants Token;                                                       \
    static DEVICE void load(const Epilogue& e, int group, int token, Rows& rows, Token& t) {   \
      rows = SPACE::load_rows(e, group);                                                       \
      t = SPACE::load_token(e, group, token);                                                  \
      SPACE::complete_token(e, group, t);                                                      \
    }                                                                                          \
  };
END_OF(PlainEnd, plain_end)
END_OF(SwigluEnd, swiglu_end)
END_OF(RopeEnd, rope_end)
#undef END_OF

// Multiplies the block's units by the tokens in shared memory; `taken` counts units of the ring. Two
// teams of four warps take units in turn.
template <class S>
DEVICE void multiply(const Shared& shared, const Share<S>& share, u32& taken) {
  const int warp = threadIdx.x / 32 % 4, team = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int units = share.count * S::UNITS;
#pragma unroll 1
  for (int u = (team ^ taken) & 1; u < units; u += 2) {
    const u32 number = taken + u, slot = number % STAGES;
    const u32 stage = __shfl_sync(~0u, shared.ring + slot * UNIT_BYTES, 0);
    const u32 tokens = __shfl_sync(~0u, shared.tokens + u % S::UNITS * OPERAND_BYTES, 0);
    float part[OPERAND_ROWS / 2];
    keep_order(part);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      barrier_wait(shared.full + 8 * (4 * slot + c), number / STAGES & 1);
      product_fence();
      const u64 a = operand(stage + c * (UNIT_BYTES / 4));
      const u64 b = operand(tokens + c * OPERAND_ROWS * 128);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Product<E4M3, OPERAND_ROWS>::add(part, a + 2 * k, b + 2 * k, c + k > 0);
      }
      product_commit();
    }
    product_wait<0>();
    keep_order(part);
    if (lane == 0) barrier_arrive(shared.empty + 8 * slot);
    // Warp w has interval w: column w + 4 t for token t.
    if (lane % 2 != warp / 2) continue;
#pragma unroll
    for (int j = 0; j < OPERAND_ROWS / 8; ++j) {
      const int token = 2 * j + lane % 4 / 2;
      if (token >= TOKENS) continue;
      const u32 to = shared.sums + u * SUM_BYTES + (token * UNIT_INTERVALS + warp) * 64 + lane / 4 * 4;
      const float low = warp % 2 ? part[4 * j + 1] : part[4 * j];
      const float high = warp % 2 ? part[4 * j + 3] : part[4 * j + 2];
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(low) : "memory");
      asm volatile("st.shared.f32 [%0 + 32], %1;" ::"r"(to), "f"(high) : "memory");
    }
  }
  taken += units;
  meet();
}

DEVICE float load_sum(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}

// What a thread finishes of a product: rows lane / 4 and the eighth after it of one of the block's
// groups, and one token.
template <class S>
struct Item {
  int nth, group, token;
  bool is_mine, is_real;  // is_mine: also tokens that the step does not have
  DEVICE Item(const Share<S>& share, int tokens) {
    const int item = threadIdx.x / 32 * 4 + threadIdx.x % 4;
    nth = item / TOKENS, token = item % TOKENS;
    group = share.first + nth * NUM_BLOCKS;
    is_mine = nth < share.count;
    is_real = is_mine && token < tokens;
  }
  DEVICE int row() const { return GROUP_ROWS * group + threadIdx.x % 32 / 4; }  // the first of the two

  // Intervals of K in ascending order.
  DEVICE void add_up(const Shared& shared, float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < S::INTERVALS; ++i) {
      const int unit = nth * S::UNITS + i / UNIT_INTERVALS;
      const u32 at = shared.sums + unit * SUM_BYTES +
                     (token * UNIT_INTERVALS + i % UNIT_INTERVALS) * 64 + threadIdx.x % 32 / 4 * 4;
      const float low = load_sum(at), high = load_sum(at + 32);
      sum[0] = i == 0 ? low : __fadd_rn(sum[0], low);
      sum[1] = i == 0 ? high : __fadd_rn(sum[1], high);
    }
  }
};

// One product: read what needs no other block, bring the tokens, multiply, finish.
template <class S, class End, class Bring, class Give>
DEVICE void product(const Shared& shared, Arrivals& arrivals, int tokens, u32& taken,
                    const typename End::Epilogue& e, const Bring& bring, const Give& give_sums) {
  const Share<S> share;
  const Item<S> item(share, tokens);
  typename End::Rows rows;
  typename End::Token token;
  if (item.is_real) End::load(e, item.group, item.token, rows, token);
  bring(share.count > 0);
  multiply<S>(shared, share, taken);
  if (item.is_mine) {
    float sum[2];
    if (item.is_real) item.add_up(shared, sum);
    give_sums(item, rows, token, sum);
  }
  if (share.count) arrivals.arrive();
  arrivals.expected += S::SHARERS;
}

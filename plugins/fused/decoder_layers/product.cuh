// The products of layers.cu. A block processes groups of weight rows with all of K, so no block adds to
// another block's sums.
#pragma once

#include "fused/decoder_layers/coded.cuh"

#define EPILOGUE 0
#define OUT_TYPE MODEL_TYPE
namespace plain_end {
#include "ops/packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE
#define EPILOGUE 1
#define OUT_TYPE E4M3
namespace swiglu_end {
#include "ops/packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE
#define EPILOGUE 2
#define OUT_TYPE MODEL_TYPE
namespace rope_end {
#include "ops/packed_linear/epilogue_values.cuh"
}
#undef EPILOGUE
#undef OUT_TYPE

// The epilogue of one product: names from a namespace of epilogue_values.cuh.
#define END_OF(NAME, SPACE)                                                                    \
  struct NAME {                                                                                \
    typedef SPACE::Epilogue Epilogue;                                                          \
    typedef SPACE::RowConstants Rows;                                                          \
    typedef SPACE::TokenConstants Token;                                                       \
    static DEVICE void load(const Epilogue& e, int group, int token, Rows& rows, Token& t) {   \
      rows = SPACE::load_rows(e, group);                                                       \
      t = SPACE::load_token(e, group, token);                                                  \
      if (!MXFP4) complete(e, group, t);                                                       \
    }                                                                                          \
    static DEVICE void complete(const Epilogue& e, int group, Token& t) {                      \
      SPACE::complete_token(e, group, t);                                                      \
    }                                                                                          \
  };
END_OF(PlainEnd, plain_end)
END_OF(SwigluEnd, swiglu_end)
END_OF(RopeEnd, rope_end)
#undef END_OF

// Multiplies the block's ring units by the tokens in shared memory; `taken` counts units of the ring.
template <class S>
DEVICE void multiply(const Shared& shared, const Share<S>& share, int team, u32& taken, Expanded& first) {
  const int units = share.count * S::UNITS, u = first_unit<S>(team, taken);
  if constexpr (MXFP4) multiply_coded_units<S>(shared, u, units, taken, first);
  else multiply_units<S>(shared, u, units, taken);
  taken += units;
  if (S::HELD_UNITS > 0) holders_meet<SUMS_ARE_THERE>();
  else meet();
}

DEVICE float load_sum(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}

// The results of a product that a thread finishes: for one token, one row of one of the block's groups and,
// if groups have 16 rows, also the row 8 further.
template <class S>
struct Item {
  static constexpr int ROWS = S::GROUP_ROWS / 8;
  int nth, group, token;
  bool is_mine, is_real;  // is_mine: true also for padding tokens
  DEVICE Item(const Share<S>& share, int tokens) {
    const int item = anew(threadIdx.x / 32 * 4 + threadIdx.x % 4);
    nth = item / TOKENS, token = item % TOKENS;
    group = share.first + nth * NUM_BLOCKS;
    is_mine = nth < share.count;
    is_real = is_mine && token < tokens;
  }
  DEVICE int row() const { return S::GROUP_ROWS * group + threadIdx.x % 32 / 4; }  // the first row
  DEVICE int group_of_16() const { return S::GROUP_ROWS == 16 ? group : group / 2; }
  DEVICE int half(int r) const { return S::GROUP_ROWS == 16 ? r : group % 2; }  // of the 16 rows

  // Adds intervals of K in ascending order.
  DEVICE void add_up(const Shared& shared, float (&sum)[ROWS]) const {
    constexpr int LINE = S::GROUP_ROWS * 4;
#pragma unroll
    for (int i = 0; i < S::INTERVALS; ++i) {
      const int unit = nth * S::UNITS + i / S::UNIT_INTERVALS, place = i % S::UNIT_INTERVALS;
      const u32 at = shared.sums<S>() + unit * SUM_BYTES +
                     (token * S::UNIT_INTERVALS + place) * LINE + threadIdx.x % 32 / 4 * 4;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float x = load_sum(at + 32 * r);
        sum[r] = i == 0 ? x : __fadd_rn(sum[r], x);
      }
    }
  }
};

// One product: read what depends on no other block, load the tokens, multiply, finish, and, once other blocks
// can continue, clear its places in the other exchange buffer. IS_AHEAD: `first` is expanded already.
template <class S, class End, bool IS_AHEAD = false, class Bring, class Give, class Clear>
DEVICE void product(const Shared& shared, Arrivals& arrivals, int tokens, u32& taken,
                    const typename End::Epilogue& e, Expanded& first, const Bring& bring,
                    const Give& give_sums, const Clear& clear_places) {
  constexpr bool IS_QKV = S::TURN == QkvSize::TURN && S::GROUPS == QkvSize::GROUPS;  // by which queries come
  const Share<S> share;
  const Item<S> item(share, tokens);
  typename End::Rows rows;
  if (MXFP4) rows = {};  // coded.cuh
  typename End::Token token = {};
  if (item.is_real) End::load(e, item.group_of_16(), item.token, rows, token);
  if (MXFP4) {
    if (!IS_AHEAD) expand_first<S>(shared, taken, first);
    if (item.is_real) End::complete(e, item.group_of_16(), token);
  }
  const int team = team_of_warp();
  bring(share.count > 0, token);
  multiply<S>(shared, share, team, taken, first);
  if (item.is_real) {
    float sum[Item<S>::ROWS];
    item.add_up(shared, sum);
    give_sums(item, rows, token, sum);
  }
  if (share.count) arrivals.arrive<(S::MOST * TOKENS <= 4)>();  // four results per warp
  // Nothing of the product is needed in shared memory any more: what is fetched next may land there.
  if (IS_FETCHED && !IS_QKV) {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(shared.room);
  }
  if (item.is_mine) clear_places(item);
  arrivals.expected += S::SHARERS;
}

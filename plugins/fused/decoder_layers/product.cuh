// The products of layers.cu. A block processes groups of weight rows with all of K, so no block adds to
// another block's sums: the 64 rows of a wgmma are 16 rows at four intervals of K or 8 rows at eight, and its
// columns the tokens at the same intervals. Only the results whose row and column have the same interval are
// used.
#pragma once

#include "fused/decoder_layers/input.cuh"

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
      SPACE::complete_token(e, group, t);                                                      \
    }                                                                                          \
  };
END_OF(PlainEnd, plain_end)
END_OF(SwigluEnd, swiglu_end)
END_OF(RopeEnd, rope_end)
#undef END_OF

DEVICE void store_sum(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

// Stores the result of a ring unit, [tokens, intervals, rows]; `to` is the lane's row.
template <class S>
DEVICE void store_sums(u32 to, const float (&part)[S::OPERAND_ROWS / 2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (S::GROUP_ROWS == 8) {  // warp w has intervals 2 w and 2 w + 1: columns w + 8 t of token t
    if (lane % 4 != warp) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      store_sum(to + (t * 8 + 2 * warp) * 32, part[4 * t]);
      store_sum(to + (t * 8 + 2 * warp + 1) * 32, part[4 * t + 3]);
    }
    return;
  }
  if (lane % 2 != warp / 2) return;  // warp w has interval w: column w + 4 t of token t
#pragma unroll
  for (int j = 0; j < S::OPERAND_ROWS / 8; ++j) {
    const int token = 2 * j + lane % 4 / 2;
    if (token >= TOKENS) continue;
    store_sum(to + (token * 4 + warp) * 64, warp % 2 ? part[4 * j + 1] : part[4 * j]);
    store_sum(to + (token * 4 + warp) * 64 + 32, warp % 2 ? part[4 * j + 3] : part[4 * j + 2]);
  }
}

// Starts the products of one chunk of a ring unit at `weights` with its tokens.
template <class S>
DEVICE void start_chunk(u32 weights, u32 tokens, int chunk, float (&part)[S::OPERAND_ROWS / 2]) {
  product_fence();
  const u64 a = operand(weights);
  const u64 b = operand(tokens + chunk * S::OPERAND_ROWS * 128);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Product<E4M3, S::OPERAND_ROWS>::add(part, a + 2 * k, b + 2 * k, chunk + k > 0);
  }
  product_commit();
}

// The same for 4-bit weights.
template <class S>
DEVICE void start_expanded(const u32 (&a)[8][4], u32 tokens, int chunk, float (&part)[S::OPERAND_ROWS / 2]) {
  product_fence();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const u64 b = operand(tokens + (2 * chunk + k / 4) * S::OPERAND_ROWS * 128) + 2 * (k % 4);
    HeldProduct<S::OPERAND_ROWS>::add(part, a[k], b, chunk + k > 0);
  }
  product_commit();
}

// A unit of the ring. Two groups of four warps (`team`) process units alternately. If the ring has an even number of
// slots, a slot is always used by the same team. If it is odd, or if units are held, the slot's previous unit belonged
// to the other team, and a barrier two passes behind has the same parity; so a unit is only waited for once the team's
// unit before it is there, whose chunks are only loaded after those before them.
constexpr int SEEN_BEFORE = CHUNKS * (STAGES - 2);
static_assert((STAGES % 2 == 0 && HELD == 0) || (IN_FLIGHT_SMALL <= SEEN_BEFORE && IN_FLIGHT_AHEAD <= SEEN_BEFORE &&
                                  IN_FLIGHT <= SEEN_BEFORE),
              "a slot's turn before may be missing: scripts/profile/ring_model.py");
struct Unit {
  u32 number, slot;
  DEVICE explicit Unit(u32 number_) : number(number_), slot(number_ % STAGES) {}
  DEVICE u32 weights(const Shared& shared, int chunk) const {
    return shared.ring + slot * UNIT_BYTES + chunk * BLOCK_BYTES;
  }
  DEVICE void wait(const Shared& shared, int chunk) const {
    barrier_wait(shared.full + 8 * (CHUNKS * slot + chunk), number / STAGES & 1);
  }
};

// The sums of a share's u-th unit, whose slot may be filled again.
template <class S>
DEVICE void finish_unit(const Shared& shared, const Unit& unit, int u, float (&part)[S::OPERAND_ROWS / 2]) {
  const int lane = threadIdx.x % 32;
  product_wait<0>();
  keep_order(part);
  if (lane == 0) barrier_arrive(shared.empty + 8 * unit.slot);
  store_sums<S>(shared.sums<S>() + u * SUM_BYTES + lane / 4 * 4, part);
}
template <class S>
DEVICE u32 tokens_of(const Shared& shared, int u) {
  return shared.tokens + u % S::UNITS * S::OPERAND_BYTES;
}

// Units of a share: the u-th, the one after the next, ...; the share's first is number `taken` of the ring.
template <class S>
DEVICE void multiply_units(const Shared& shared, int u, int units, u32 taken) {
#pragma unroll 1
  for (; u < units; u += 2) {
    const Unit unit(taken + u);
    float part[S::OPERAND_ROWS / 2];
    keep_order(part);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      unit.wait(shared, c);
      start_chunk<S>(unit.weights(shared, c), tokens_of<S>(shared, u), c, part);
    }
    finish_unit<S>(shared, unit, u, part);
  }
}

// 4-bit weights: whether chunks are expanded ahead of their products. For two tokens there are not enough registers.
constexpr bool IS_AHEAD = MXFP4 && TOKENS == 1;

DEVICE void wait_for_unit(const Shared& shared, const Unit& unit) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) unit.wait(shared, c);
}
DEVICE Mxfp4Chunk load_coded(const Shared& shared, const Unit& unit, int chunk) {
  const u32 rows = threadIdx.x / 32 % 4 * (2 * MXFP4_OCTET_BYTES);  // of the warp
  return Mxfp4Chunk(shared.table, unit.weights(shared, chunk) + rows);
}
DEVICE void expand_first(const Shared& shared, const Unit& unit, u32 (&first)[8][4]) {
  wait_for_unit(shared, unit);
  load_coded(shared, unit, 0).expand(0, first);
}

// The same for 4-bit weights. While a chunk is multiplied the next one is expanded, also that of the next unit; `first`
// is that of unit `u`, expanded before its tokens came. Each chunk of a unit has registers of its own, for those that a
// running product reads must not be written.
template <class S>
DEVICE void multiply_coded_units(const Shared& shared, int u, int units, u32 taken, u32 (&first)[8][4]) {
  if (u >= units) return;
  u32 second[8][4];
  const u32 same = tokens_of<S>(shared, u);
  const auto start = [&](const Mxfp4Chunk& chunk, float (&part)[S::OPERAND_ROWS / 2]) {
    keep_order(part);
    // With two units to a group of rows, all of a team's have the same tokens: their addresses are kept.
    const u32 tokens = S::UNITS == 2 ? same : tokens_of<S>(shared, u);
    start_expanded<S>(first, tokens, 0, part);
    chunk.expand(0, second);
    start_expanded<S>(second, tokens, 1, part);
  };
  if constexpr (IS_AHEAD) {
    Unit unit(taken + u);
#pragma unroll 1
    for (; u + 2 < units; u += 2) {
      float part[S::OPERAND_ROWS / 2];
      start(load_coded(shared, unit, 1), part);
      const Unit next(taken + u + 2);
      wait_for_unit(shared, next);
      const Mxfp4Chunk chunk = load_coded(shared, next, 0);
      product_wait<1>();
      chunk.expand(0, first);
      finish_unit<S>(shared, unit, u, part);
      unit = next;
    }
    float part[S::OPERAND_ROWS / 2];
    start(load_coded(shared, unit, 1), part);
    finish_unit<S>(shared, unit, u, part);
  } else {
#pragma unroll 1
    for (; u < units; u += 2) {
      const Unit unit(taken + u);
      wait_for_unit(shared, unit);
      const Mxfp4Chunk chunk = load_coded(shared, unit, 0), other = load_coded(shared, unit, 1);
      chunk.expand(0, first);
      float part[S::OPERAND_ROWS / 2];
      start(other, part);
      finish_unit<S>(shared, unit, u, part);
    }
  }
}

// The first of a share's units that a team processes.
template <class S>
DEVICE int first_unit(int team, u32 taken) {
  return S::HELD_UNITS + ((team ^ taken ^ S::HELD_UNITS) & 1);
}

// Multiplies the block's ring units by the tokens in shared memory; `taken` counts units of the ring.
template <class S>
DEVICE void multiply(const Shared& shared, const Share<S>& share, int team, u32& taken, u32 (&expanded)[8][4]) {
  const int units = share.count * S::UNITS, first = first_unit<S>(team, taken);
  if constexpr (MXFP4) multiply_coded_units<S>(shared, first, units, taken, expanded);
  else multiply_units<S>(shared, first, units, taken);
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
// can continue, clear its places in the other exchange buffer.
template <class S, class End, class Bring, class Give, class Clear>
DEVICE void product(const Shared& shared, Arrivals& arrivals, int tokens, u32& taken,
                    const typename End::Epilogue& e, const Bring& bring, const Give& give_sums,
                    const Clear& clear_places) {
  const Share<S> share;
  const Item<S> item(share, tokens);
  typename End::Rows rows;
  typename End::Token token = {};
  if (item.is_real) End::load(e, item.group_of_16(), item.token, rows, token);
  const int team = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform in the warp, and so are addresses
  u32 expanded[8][4];  // of 4-bit weights, what needs no tokens
  if constexpr (IS_AHEAD) {
    const int first = first_unit<S>(team, taken);
    if (first < share.count * S::UNITS) expand_first(shared, Unit(taken + first), expanded);
  }
  bring(share.count > 0, token);
  multiply<S>(shared, share, team, taken, expanded);
  if (item.is_real) {
    float sum[Item<S>::ROWS];
    item.add_up(shared, sum);
    give_sums(item, rows, token, sum);
  }
  if (share.count) arrivals.arrive<(S::MOST * TOKENS <= 4)>();  // four results per warp
  if (item.is_mine) clear_places(item);
  arrivals.expected += S::SHARERS;
}

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
DEVICE void start_expanded(const Mxfp4Chunk& weights, u32 tokens, int chunk,
                           float (&part)[S::OPERAND_ROWS / 2]) {
  u32 a[8][4];
  weights.expand(0, a);
  product_fence();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const u64 b = operand(tokens + (2 * chunk + k / 4) * S::OPERAND_ROWS * 128) + 2 * (k % 4);
    HeldProduct<S::OPERAND_ROWS>::add(part, a[k], b, chunk + k > 0);
  }
  product_commit();
}

// A ring unit of 4-bit weights. Each chunk has its own registers, and no register that a running product reads
// is written: so no product waits, and the second chunk is expanded while the first is multiplied.
template <class S>
DEVICE void multiply_expanded(const Shared& shared, u32 slot, u32 parity, u32 stage, u32 tokens,
                              float (&part)[S::OPERAND_ROWS / 2]) {
  const u32 octets = stage + threadIdx.x / 32 % 4 * (2 * MXFP4_OCTET_BYTES);
  barrier_wait(shared.full + 8 * (2 * slot), parity);
  barrier_wait(shared.full + 8 * (2 * slot + 1), parity);
  const Mxfp4Chunk first(shared.table, octets), second(shared.table, octets + BLOCK_BYTES);
  start_expanded<S>(first, tokens, 0, part);
  start_expanded<S>(second, tokens, 1, part);
}

// Multiplies the block's ring units by the tokens in shared memory; `taken` counts units of the ring. Two
// groups of four warps (`team`) process units alternately. If the ring has an even number of slots, a slot is
// always used by the same team. If it is odd, or if units are held, the slot's previous unit belonged to the
// other team, and a barrier two passes behind has the same parity; so the unit is only waited for once the unit
// before last is there, whose chunks are only loaded after those before them.
constexpr int SEEN_BEFORE = CHUNKS * (STAGES - 2);
static_assert((STAGES % 2 == 0 && HELD == 0) || (IN_FLIGHT_SMALL <= SEEN_BEFORE && IN_FLIGHT_AHEAD <= SEEN_BEFORE &&
                                  IN_FLIGHT <= SEEN_BEFORE),
              "a slot's turn before may be missing: scripts/profile/ring_model.py");
template <class S>
DEVICE void multiply(const Shared& shared, const Share<S>& share, int team, u32& taken) {
  const int lane = threadIdx.x % 32;
  const int units = share.count * S::UNITS;
#pragma unroll 1
  for (int u = S::HELD_UNITS + ((team ^ taken ^ S::HELD_UNITS) & 1); u < units; u += 2) {
    const u32 number = taken + u, slot = number % STAGES;
    const u32 stage = shared.ring + slot * UNIT_BYTES;
    const u32 tokens = shared.tokens + u % S::UNITS * S::OPERAND_BYTES;
    float part[S::OPERAND_ROWS / 2];
    keep_order(part);
    if constexpr (MXFP4) {
      multiply_expanded<S>(shared, slot, number / STAGES & 1, stage, tokens, part);
    } else {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        barrier_wait(shared.full + 8 * (CHUNKS * slot + c), number / STAGES & 1);
        start_chunk<S>(stage + c * BLOCK_BYTES, tokens, c, part);
      }
    }
    product_wait<0>();
    keep_order(part);
    if (lane == 0) barrier_arrive(shared.empty + 8 * slot);
    store_sums<S>(shared.sums<S>() + u * SUM_BYTES + lane / 4 * 4, part);
  }
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
  bring(share.count > 0, token);
  multiply<S>(shared, share, team, taken);
  if (item.is_real) {
    float sum[Item<S>::ROWS];
    item.add_up(shared, sum);
    give_sums(item, rows, token, sum);
  }
  if (share.count) arrivals.arrive<(S::MOST * TOKENS <= 4)>();  // four results per warp
  if (item.is_mine) clear_places(item);
  arrivals.expected += S::SHARERS;
}

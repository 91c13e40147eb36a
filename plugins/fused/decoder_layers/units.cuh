// The ring units of a product of layers.cu: how they are multiplied, and where their sums are stored. The 64 rows of a
// wgmma are 16 weight rows at four intervals of K or 8 rows at eight, and its columns the tokens at the same intervals.
// Only the results whose row and column have the same interval are used.
#pragma once

#include "fused/decoder_layers/input.cuh"

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

// A unit of the ring. Two groups of four warps (`team`) process units alternately. If the ring has an even number of
// slots, a slot is always used by the same team. If it is odd, or if units are held, the slot's previous unit belonged
// to the other team, and a barrier two passes behind has the same parity; so a unit is only waited for once the team's
// unit before it is there, whose chunks are only loaded after those before them.
constexpr int SEEN_BEFORE = CHUNKS * (STAGES - 2);
static_assert((STAGES % 2 == 0 && HELD == 0) || (IN_FLIGHT_SMALL <= SEEN_BEFORE && IN_FLIGHT_AHEAD <= SEEN_BEFORE &&
                                  IN_FLIGHT <= SEEN_BEFORE),
              "a slot's turn before may be missing: scripts/profile/ring_model.py");
struct Unit {
  u32 slot, parity;
  DEVICE explicit Unit(u32 number) : slot(number % STAGES), parity(number / STAGES & 1) {}
  DEVICE u32 weights(const Shared& shared, int chunk) const {
    return shared.ring + slot * UNIT_BYTES + chunk * BLOCK_BYTES;
  }
  DEVICE void wait(const Shared& shared, int chunk) const {
    barrier_wait(shared.full + 8 * (CHUNKS * slot + chunk), parity);
  }
  // The team's next one.
  DEVICE Unit next() const {
    Unit x = *this;
    x.slot += 2;
    if (x.slot >= STAGES) x.slot -= STAGES, x.parity ^= 1;
    return x;
  }
};

// Stores the sums of a share's u-th unit, which is multiplied.
template <class S>
DEVICE void keep_sums(const Shared& shared, int u, float (&part)[S::OPERAND_ROWS / 2]) {
  keep_order(part);
  store_sums<S>(shared.sums<S>() + u * SUM_BYTES + lane_id() / 4 * 4, part);
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
    product_wait<0>();
    keep_order(part);
    if (lane_id() == 0) barrier_arrive(shared.empty + 8 * unit.slot);  // it may be filled again
    keep_sums<S>(shared, u, part);
  }
}

// The first of a share's units that a team processes.
template <class S>
DEVICE int first_unit(int team, u32 taken) {
  return S::HELD_UNITS + ((team ^ taken ^ S::HELD_UNITS) & 1);
}
DEVICE int team_of_warp() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }  // uniform, and so are addresses

// 4-bit weights in layers.cu. A team's next unit is expanded while the one before is multiplied, and its first one
// before the tokens come: what a block needs between the arrival of tokens and its results, other blocks wait for.
//
// Registers of `Expanded` are set in every branch, if to zero. Otherwise they would be kept from layer to layer.
// Code has to be short, too: layers larger than the instruction cache took up to 25 % longer.
#pragma once

#include "fused/decoder_layers/units.cuh"

typedef u32 Expanded[CHUNKS][8][4];  // a unit, as the tensor cores take it

// Starts the products of an expanded chunk.
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

DEVICE Mxfp4Chunk load_coded(const Shared& shared, const Unit& unit, int chunk) {
  const u32 rows = threadIdx.x / 32 % 4 * (2 * MXFP4_OCTET_BYTES);  // of the warp
  return Mxfp4Chunk(shared.table, unit.weights(shared, chunk) + rows);
}
// The slot may be filled again: the warp has all of its codes in registers.
DEVICE void release(const Shared& shared, const Unit& unit) {
  __syncwarp();
  if (lane_id() == 0) barrier_arrive(shared.empty + 8 * unit.slot);
}

DEVICE void expand_second(const Shared& shared, const Unit& unit, Expanded& to) {
  const Mxfp4Chunk chunk = load_coded(shared, unit, 1);
  release(shared, unit);
  chunk.expand(0, to[1]);
}

// How much of a team's next unit is expanded ahead: all of it, or its first chunk, for two tokens have longer code.
constexpr bool IS_WHOLE_AHEAD = TOKENS == 1;

// That of the first unit of the team's share, if it has one.
template <class S>
DEVICE void expand_first(const Shared& shared, u32 taken, Expanded& to) {
  if constexpr (MXFP4) {
    const int first = first_unit<S>(team_of_warp(), taken);
    if (first >= Share<S>().count * S::UNITS) return;
    const Unit unit(taken + first);
    unit.wait(shared, 0);
    load_coded(shared, unit, 0).expand(0, to[0]);
    unit.wait(shared, 1);  // not before: both chunks' codes at once take too many registers
    if (IS_WHOLE_AHEAD) expand_second(shared, unit, to);
  }
}

// Units of a share: the u-th, of which `now` has as much, the one after the next, ...; the share's first is number
// `taken` of the ring. Each chunk has registers of its own, for those that a running product reads must not be written.
template <class S>
DEVICE void multiply_coded_units(const Shared& shared, int u, int units, u32 taken, Expanded& now) {
  if (u >= units) return;
  Unit unit(taken + u);
  int place = S::UNITS <= 2 ? u % S::UNITS : anew(u) % S::UNITS;  // of the unit's tokens
#pragma unroll 1
  while (true) {
    float part[S::OPERAND_ROWS / 2];
    keep_order(part);
    const u32 tokens = shared.tokens + place * S::OPERAND_BYTES;
    if (IS_WHOLE_AHEAD) {
      start_expanded<S>(now[0], tokens, 0, part);
    } else {
      const Mxfp4Chunk second = load_coded(shared, unit, 1);
      release(shared, unit);
      start_expanded<S>(now[0], tokens, 0, part);
      second.expand(0, now[1]);
    }
    start_expanded<S>(now[1], tokens, 1, part);
    const int done = u;
    u += 2, unit = unit.next();
    if (S::UNITS > 2) {
      place += 2;
      if (place >= S::UNITS) place -= S::UNITS;
    }
    const bool is_last = u >= units;
    if (!is_last) {
      unit.wait(shared, 0);
      if (!IS_WHOLE_AHEAD) unit.wait(shared, 1);
      const Mxfp4Chunk first = load_coded(shared, unit, 0);
      product_wait<1>();
      first.expand(0, now[0]);
      if (IS_WHOLE_AHEAD) unit.wait(shared, 1);
    }
    product_wait<0>();
    keep_sums<S>(shared, done, part);
    if (is_last) break;
    if (IS_WHOLE_AHEAD) expand_second(shared, unit, now);
  }
}

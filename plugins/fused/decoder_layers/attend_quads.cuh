// How a team of layers.cu processes four tiles of a long context, which are in the ring (`quad`): each warp multiplies
// one tile's keys and finds its weights; then each multiplies a part of the dimensions of all four tiles' values. The
// operations and their order are those of `take_tiles` for one tile after the other.
#pragma once

#include "fused/decoder_layers/attend_walk.cuh"

namespace attention {
constexpr int TILE_WEIGHTS = BLOCKS * 2 * 32 * 4, BY_COLUMN = COLUMNS * 4;  // bytes of a tile's
constexpr int TEAM_BYTES = QUAD * (TILE_WEIGHTS + 4 * BY_COLUMN);

DEVICE void store_two(u32 to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
DEVICE void store_one(u32 to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
DEVICE float load_one(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEVICE float2 load_two(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
DEVICE float4 load_four(u32 at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
DEVICE uint4 load_words(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// What warps of a team tell each other about a quad's tiles, each by column: the largest logit of the tile, that of the
// work item until there, what sums before it are multiplied with, and the sum of its weights.
struct Told {
  u32 weights, tops, largest, fades, totals;
  DEVICE explicit Told(u32 at) : weights(at), tops(at + QUAD * TILE_WEIGHTS) {
    largest = tops + QUAD * BY_COLUMN, fades = largest + QUAD * BY_COLUMN, totals = fades + QUAD * BY_COLUMN;
  }
};

// The tiles of a work item that begins with or before a tile: a power of two.
DEVICE int unit_tiles(int tile) { return tile < 16 ? 1 : tile < 32 ? 2 : tile < 64 ? 4 : 8; }
DEVICE bool begins_unit(int tile) { return (tile & (unit_tiles(tile) - 1)) == 0; }

// Adds a tile's values to a work item.
DEVICE void add_values(OwnState& state, const Told& told, int t, u32 values) {
  const int lane = lane_id(), columns = lane % 4 * 8;
  const float2 fade = load_two(told.fades + t * BY_COLUMN + columns);
  const float sum = load_one(told.totals + t * BY_COLUMN + columns + lane / 4 % 2 * 4);
  const uint4 low = load_words(told.weights + t * TILE_WEIGHTS + lane * 16);
  const uint4 high = load_words(told.weights + t * TILE_WEIGHTS + 512 + lane * 16);
  const u32 weights[1][BLOCKS][2] = {{{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}}};
  state.total[0] = __fmaf_rn(state.total[0], lane & 4 ? fade.y : fade.x, sum);
#pragma unroll
  for (int i = 0; i < OWN_STEPS * 4; ++i) {
    float& x = state.sums[0][i / 4][i % 4];
    x = __fmul_rn(x, i % 2 ? fade.y : fade.x);
  }
  multiply_values<OWN_STEPS>(state.sums, weights, TileKeys(values), warp_of_team() * OWN_STEPS);
}

// Gives the work item that ends with the t-th tile of a quad.
DEVICE void give_unit(const Step& s, const Exchange& x, const Told& told, int head, int first, int t, OwnState& state) {
  const float2 largest = load_two(told.largest + t * BY_COLUMN + lane_id() % 4 * 8);
  state.largest[0][0] = largest.x, state.largest[0][1] = largest.y;
  StatePlace(x.now, head, count_units(first + t + 1) - 1).give(s.num_rows, state);
}
// Two work items of two tiles, which do not wait for each other.
template <class Values>
DEVICE void take_pairs(const Step& s, const Exchange& x, const Told& told, int head, int first, const Values& values_of) {
  OwnState states[2];
#pragma unroll
  for (int t = 0; t < QUAD; ++t) {
    if (t % 2 == 0) states[t / 2].clear();
    add_values(states[t / 2], told, t, values_of(t));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) give_unit(s, x, told, head, first, 2 * i + 1, states[i]);
}

// Values of keys that a context has not: zeros, for their weights are zero.
DEVICE void clear_behind(u32 values, int keys) {
#pragma unroll 1
  for (int i = keys * CHUNKS + lane_id(); i < KEYS * CHUNKS; i += 32) {
    store_shared16(values + place(i / CHUNKS, i % CHUNKS), {0, 0, 0, 0});
  }
}

// Four tiles in the ring, and the warp's own one.
struct Quad {
  int first, tile;  // tiles of the context
  u32 number;       // of its first ring unit
  bool is_there;    // the warp's tile, in the context

  Quad() = default;
  DEVICE Quad(const Step& s, int first_, u32 number_) : first(first_), number(number_) {
    tile = first + warp_of_team(), is_there = tile < s.tiles;
  }
  DEVICE u32 keys_of(const Shared& shared, int t) const {
    return shared.ring + (number + t / PER_SLOT) % STAGES * UNIT_BYTES + t % PER_SLOT * SLOT_BYTES;
  }
  DEVICE u32 values_of(const Shared& shared, int t) const { return keys_of(shared, t) + TILE_BYTES; }
  // Waits for the warp's tile, and completes it.
  DEVICE void take(const Shared& shared, const Step& s, const Fresh& fresh) const {
    const int own = warp_of_team();
    const u32 its = number + own / PER_SLOT, full = shared.full + 8 * ::CHUNKS * (its % STAGES);
#pragma unroll
    for (int c = 0; c < CHUNKS_OF_TILE; ++c) {
      barrier_wait(full + 8 * (own % PER_SLOT * CHUNKS_OF_TILE + c), its / STAGES & 1);
    }
    if (!is_there) return;
    const u32 keys = keys_of(shared, own);
    clear_behind(keys + TILE_BYTES, s.limit - tile * KEYS);
    fresh.add_to(keys, s, tile, 0), fresh.add_to(keys, s, tile, 1);
  }
  DEVICE void multiply(const Shared& shared, const Queries& queries, Logits& logits) const {
    multiply_keys<BLOCKS>(logits, queries, TileKeys(keys_of(shared, warp_of_team())));
  }
  // Its units may be filled again, once all warps of the team have said so.
  DEVICE void release(const Shared& shared) const {
    __syncwarp();
    if (lane_id() > 0) return;
#pragma unroll
    for (int i = 0; i < QUAD_SLOTS; ++i) barrier_arrive(shared.empty + 8 * ((number + i) % STAGES));
  }
};

// A tile that is a work item, by one warp.
DEVICE void take_alone(const Step& s, const Exchange& x, const Shared& shared, const Fresh& fresh,
                       const Queries& queries, int head, const Quad& quad, float scale) {
  quad.take(shared, s, fresh);
  if (quad.is_there) {
    Logits logits;
    quad.multiply(shared, queries, logits);
    State state;
    state.clear();
    u32 weights[1][BLOCKS][2];
    const int tile = quad.tile, last[1][2] = {{s.seen[0] - tile * KEYS, s.seen[1] - tile * KEYS}};
    soften(state, logits, weights, last, scale, (tile + 1) * KEYS - 1 > s.all_see, true);
    multiply_values<STEPS>(state.sums, weights, TileKeys(quad.values_of(shared, warp_of_team())));
    StatePlace(x.now, head, tile, 0).give_whole(s.num_rows, state);
  }
  quad.release(shared);
}

// Tells the others the largest logits of the warp's tile.
DEVICE void tell_tops(const Step& s, const Quad& quad, const Told& told, Logits& logits, float scale) {
  const int lane = lane_id(), tile = quad.tile;
  float tops[2] = {minus_infinity(), minus_infinity()};
  if (quad.is_there) {
    if ((tile + 1) * KEYS - 1 > s.all_see) {
#pragma unroll
      for (int i = 0; i < BLOCKS * 4; ++i) {
        float& x = logits[0][i / 4][i % 4];
        x = 16 * (i / 4) + i % 4 / 2 * 8 + lane / 4 <= s.seen[i % 2] - tile * KEYS ? x : minus_infinity();
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = fmaxf(logits[0][0][c], logits[0][0][c + 2]);
#pragma unroll
      for (int b = 1; b < BLOCKS; ++b) top = fmaxf(top, fmaxf(logits[0][b][c], logits[0][b][c + 2]));
      tops[c] = top;
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) tops[c] = fmaxf(tops[c], __shfl_xor_sync(~0u, tops[c], apart));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) tops[c] = __fmul_rn(tops[c], scale);
  }
  if (lane < 4) store_two(told.tops + warp_of_team() * BY_COLUMN + lane * 8, tops[0], tops[1]);
}

// The largest logits of a work item before the warp's tile, with it, and with all of the quad.
struct Largest {
  float2 before, own, all;
  DEVICE Largest(const OwnState& state, const Quad& quad, const Told& told) {
    const float2 nothing = {minus_infinity(), minus_infinity()};
    all = {state.largest[0][0], state.largest[0][1]};
    if (begins_unit(quad.first)) all = nothing;
#pragma unroll
    for (int t = 0; t < QUAD; ++t) {
      const float2 top = load_two(told.tops + t * BY_COLUMN + lane_id() % 4 * 8);
      if (t == 2 && unit_tiles(quad.first) == 2) all = nothing;
      if (t == warp_of_team()) before = all;
      all.x = fmaxf(all.x, top.x), all.y = fmaxf(all.y, top.y);
      if (t == warp_of_team()) own = all;
    }
  }
};

// Tells the others the weights of the warp's tile: the rest of `soften`.
DEVICE void tell_weights(const Told& told, const Logits& logits, const Largest& largest, float scale) {
  static_assert(BLOCKS == 4, "a lane's weights of a tile are two stores");
  const int own = warp_of_team(), lane = lane_id(), columns = lane % 4 * 8;
  const bool is_odd = lane & 4;
  const float base[2] = {finite(largest.own.x), finite(largest.own.y)};
  float sum = 0.0f;
  u32 weights[BLOCKS * 2];
#pragma unroll
  for (int i = 0; i < BLOCKS * 2; ++i) {
    const float first = exp2(__fmaf_rn(logits[0][i / 2][i % 2 * 2], scale, -base[0]));
    const float second = exp2(__fmaf_rn(logits[0][i / 2][i % 2 * 2 + 1], scale, -base[1]));
    const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
    const float even = is_odd ? other : first, odd = is_odd ? second : other;
    sum = __fadd_rn(i == 0 ? even : __fadd_rn(sum, even), odd);
    weights[i] = transpose(Inner::pack_pair(first, second));
  }
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
  const u32 to = told.weights + own * TILE_WEIGHTS + lane * 16;
  store_shared16(to, {weights[0], weights[1], weights[2], weights[3]});
  store_shared16(to + 512, {weights[4], weights[5], weights[6], weights[7]});
  if (lane < 8) store_one(told.totals + own * BY_COLUMN + columns + lane / 4 * 4, sum);
  if (lane < 4) {
    const float2 fades = {exp2(__fsub_rn(largest.before.x, base[0])), exp2(__fsub_rn(largest.before.y, base[1]))};
    store_two(told.fades + own * BY_COLUMN + columns, fades.x, fades.y);
    store_two(told.largest + own * BY_COLUMN + columns, largest.own.x, largest.own.y);
  }
}

// Adds the quad's values. state: what the quad before left of the same work item, if there is one.
DEVICE void add_quad(const Step& s, const Exchange& x, const Shared& shared, const Quad& quad, const Told& told,
                     OwnState& state, const float2& largest, int head) {
  const int first = quad.first;
  const auto values_of = [&](int t) { return quad.values_of(shared, t); };
  // The context's end; and with heads of 128 whatever there is little of, for the code would be too long.
  if (first + QUAD > s.tiles || (SIZE > 64 && unit_tiles(first) < QUAD)) {
#pragma unroll 1
    for (int t = 0; t < QUAD && first + t < s.tiles; ++t) {
      if (begins_unit(first + t)) state.clear();
      add_values(state, told, t, values_of(t));
      if (begins_unit(first + t + 1) || first + t + 1 == s.tiles) give_unit(s, x, told, head, first, t, state);
    }
  } else if (unit_tiles(first) >= QUAD) {
    if (begins_unit(first)) state.clear();
#pragma unroll
    for (int t = 0; t < QUAD; ++t) add_values(state, told, t, values_of(t));
    state.largest[0][0] = largest.x, state.largest[0][1] = largest.y;
    if (begins_unit(first + QUAD) || first + QUAD == s.tiles) give_unit(s, x, told, head, first, QUAD - 1, state);
  } else if (SIZE == 64) {
    take_pairs(s, x, told, head, first, values_of);
  }
}

DEVICE void take_quad(const Step& s, const Exchange& x, const Shared& shared, const Fresh& fresh,
                      const Queries& queries, const Told& told, OwnState& state, int head, const Quad& quad,
                      float scale) {
  Logits logits;
  quad.take(shared, s, fresh);
  if (quad.is_there) quad.multiply(shared, queries, logits);
  tell_tops(s, quad, told, logits, scale);
  team_meet();
  const Largest largest(state, quad, told);
  if (quad.is_there) tell_weights(told, logits, largest, scale);
  team_meet();
  add_quad(s, x, shared, quad, told, state, largest.all, head);
  quad.release(shared);
}
}  // namespace attention

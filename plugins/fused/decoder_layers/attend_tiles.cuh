// How a team of layers.cu processes the tiles of a work item (`unit`), once its queries are there.
#pragma once

#include "fused/decoder_layers/attend_unit.cuh"

namespace attention {
static_assert(!TAKES_TWO || ((SLOTS == 2 || LENDS) && READS_AHEAD), "two tiles have a slot and page numbers each");
static_assert(BLOCKS * 16 * LINE == TILE_BYTES && 16 * LINE >= 32 * 16, "a warp's logits take the place of its keys");

// The warps' logits are stored where their keys were, for all warps of the team.
DEVICE void share_logits(const LogitsOf<1>& own, u32 keys) {
  const u32 to = keys + warp_of_team() * (16 * LINE) + lane_id() * 16;
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(own[0][0][0]),
               "f"(own[0][0][1]), "f"(own[0][0][2]), "f"(own[0][0][3])
               : "memory");
}
DEVICE void load_logits(Logits& all, u32 keys) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    float(&x)[4] = all[0][block];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(keys + block * (16 * LINE) + lane_id() * 16)
                 : "memory");
  }
}

// `soften` for the first two tiles of a work item: the same operations in the same order, but those of one tile do not
// wait for those of the other. The first tile's sums have to be multiplied by `fade` ahead of the second one's products.
struct Pair {
  u32 weights[2][1][BLOCKS][2];
  float fade[2];  // by column

  DEVICE void soften(OwnState& state, Logits (&logits)[2], const int (&last)[2][2], const bool (&is_masked)[2],
                     float scale) {
    const int key = lane_id() / 4;
    const bool is_odd = lane_id() & 4;
    float tops[2][2], base[2][2], sum[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (is_masked[t]) {
#pragma unroll
        for (int i = 0; i < BLOCKS * 4; ++i) {
          float& x = logits[t][0][i / 4][i % 4];
          x = 16 * (i / 4) + i % 4 / 2 * 8 + key <= last[t][i % 2] ? x : minus_infinity();
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = fmaxf(logits[t][0][0][c], logits[t][0][0][c + 2]);
#pragma unroll
        for (int b = 1; b < BLOCKS; ++b) top = fmaxf(top, fmaxf(logits[t][0][b][c], logits[t][0][b][c + 2]));
        tops[t][c] = top;
      }
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& top = tops[i / 2][i % 2];
        top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float top = fmaxf(state.largest[0][c], __fmul_rn(tops[t][c], scale));
        base[t][c] = finite(top);
        if (t > 0) fade[c] = exp2(__fsub_rn(state.largest[0][c], base[t][c]));
        state.largest[0][c] = top;
      }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float(&x)[4] = logits[t][0][i / 2];
        float& first = x[i % 2 * 2];
        float& second = x[i % 2 * 2 + 1];
        first = exp2(__fmaf_rn(first, scale, -base[t][0]));
        second = exp2(__fmaf_rn(second, scale, -base[t][1]));
        const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
        const float even = is_odd ? other : first, odd = is_odd ? second : other;
        sum[t] = __fadd_rn(i == 0 ? even : __fadd_rn(sum[t], even), odd);
        weights[t][0][i / 2][i % 2] = transpose(Inner::pack_pair(first, second));
      }
    }
#pragma unroll
    for (int apart = 16; apart >= 8; apart /= 2) {
#pragma unroll
      for (int t = 0; t < 2; ++t) sum[t] = __fadd_rn(sum[t], __shfl_xor_sync(~0u, sum[t], apart));
    }
    state.total[0] = __fmaf_rn(sum[0], is_odd ? fade[1] : fade[0], sum[1]);
  }
};

// Adds a tile to the state or, with IS_TWO, the first two of a work item side by side.
template <bool IS_TWO>
DEVICE void take_tiles(const Step& s, const Fresh& fresh, const Queries& queries, const Work& work, OwnState& state,
                       int tile, float scale) {
  constexpr int N = IS_TWO ? 2 : 1;
  const u32 keys[2] = {work.slot(tile), work.slot(tile + 1)};
  wait_for_copies<1>();
  __syncwarp();
  LogitsOf<1> own[N];
#pragma unroll
  for (int t = 0; t < N; ++t) fresh.add_to(keys[t], s, tile + t, 0);
#pragma unroll
  for (int t = 0; t < N; ++t) multiply_keys<1>(own[t], queries, TileKeys(keys[t]), warp_of_team());
  __syncwarp();
#pragma unroll
  for (int t = 0; t < N; ++t) share_logits(own[t], keys[t]);
  wait_for_copies<0>();
  __syncwarp();  // a lane waits for its own copies alone
#pragma unroll
  for (int t = 0; t < N; ++t) fresh.add_to(keys[t], s, tile + t, 1);
  team_meet();
  Logits logits[N];
#pragma unroll
  for (int t = 0; t < N; ++t) load_logits(logits[t], keys[t]);
  if constexpr (IS_TWO) {
    Pair pair;
    const int last[2][2] = {{s.seen[0] - tile * KEYS, s.seen[1] - tile * KEYS},
                            {s.seen[0] - (tile + 1) * KEYS, s.seen[1] - (tile + 1) * KEYS}};
    const bool is_masked[2] = {(tile + 1) * KEYS - 1 > s.all_see, (tile + 2) * KEYS - 1 > s.all_see};
    pair.soften(state, logits, last, is_masked, scale);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; t > 0 && i < OWN_STEPS * 4; ++i) {
        float& x = state.sums[0][i / 4][i % 4];
        x = __fmul_rn(x, pair.fade[i % 2]);
      }
      multiply_values<OWN_STEPS>(state.sums, pair.weights[t], TileKeys(keys[t] + TILE_BYTES),
                                 warp_of_team() * OWN_STEPS);
    }
  } else {
    u32 weights[1][BLOCKS][2];
    const int last[1][2] = {{s.seen[0] - tile * KEYS, s.seen[1] - tile * KEYS}};
    soften(state, logits[0], weights, last, scale, (tile + 1) * KEYS - 1 > s.all_see, tile == work.tile);
    multiply_values<OWN_STEPS>(state.sums, weights, TileKeys(keys[0] + TILE_BYTES), warp_of_team() * OWN_STEPS);
  }
}

// is_fetched: queries, keys and values of the step's own tokens were copied, when the barrier has passed `parity`.
DEVICE void take_unit(const Step& s, const Exchange& x, const Arrivals& arrivals, Work& work,
                      float scale, const Shared& shared, bool is_fetched, u32 parity) {
  const bool has_second = MOST_TILES > 1 && work.tile + 1 < work.end;
  Kept kept;
  if (KEEPS && has_second) kept.load(work);
  OwnState state;
  state.clear();
  Queries queries;
  const int team = threadIdx.x / (32 * TEAM);
  Fresh fresh(s, x, work, is_fetched ? shared.tokens + TILES_BYTES + team * TEAM_LANDING : 0);
  if (IS_FETCHED && is_fetched) {
    barrier_wait(shared.came_queries + 8 * team, parity);
  } else {
    if (warp_of_team() == 0) arrivals.wait_in_warp();
    team_meet();
  }
  fresh.take(s, work, queries);
  if constexpr (MOST_TILES == 1) {
    take_tiles<false>(s, fresh, queries, work, state, work.tile, scale);
  } else if constexpr (LENDS && TAKES_TWO) {
    if (has_second) take_tiles<true>(s, fresh, queries, work, state, work.tile, scale);
    else take_tiles<false>(s, fresh, queries, work, state, work.tile, scale);
  } else if constexpr (LENDS) {
#pragma unroll 1
    for (int tile = work.tile; tile < work.end; ++tile) take_tiles<false>(s, fresh, queries, work, state, tile, scale);
  } else if constexpr (TAKES_TWO) {
    int tile = work.tile;
    if (has_second) {
      prefetch_two(work.pages, work.ahead, work.cache, work.head, tile + 2, work.end);
      take_tiles<true>(s, fresh, queries, work, state, tile, scale);
      tile += 2;
    }
    // More than two at once only in long contexts: two at a time in a loop take more registers than there are.
#pragma unroll 1
    for (; tile < work.end; ++tile) {
      if (tile > work.tile && (tile - work.tile) % 2 == 0) {
        team_meet();  // both slots are free
        work.copy(tile);
      }
      take_tiles<false>(s, fresh, queries, work, state, tile, scale);
    }
  } else {
#pragma unroll 1
    for (int tile = work.tile; tile < work.end; ++tile) {
      const u32 keys = work.slot(tile), values = keys + TILE_BYTES;
      wait_for_copies<1>();
      __syncwarp();
      fresh.add_to(keys, s, tile, 0);
      LogitsOf<1> own;
      multiply_keys<1>(own, queries, TileKeys(keys), warp_of_team());
      __syncwarp();
      share_logits(own, keys);
      wait_for_copies<0>();
      __syncwarp();  // a lane waits for its own copies alone
      fresh.add_to(keys, s, tile, 1);
      team_meet();
      if (SLOTS == 2 && tile + 1 < work.end) work.copy(tile + 1);  // no warp reads there any more
      Logits logits;
      load_logits(logits, keys);
      u32 weights[1][BLOCKS][2];
      const int last[1][2] = {{s.seen[0] - tile * KEYS, s.seen[1] - tile * KEYS}};
      soften(state, logits, weights, last, scale, (tile + 1) * KEYS - 1 > s.all_see,
             tile == work.tile);
      multiply_values<OWN_STEPS>(state.sums, weights, TileKeys(values), warp_of_team() * OWN_STEPS);
      if (SLOTS == 1 && tile + 1 < work.end) {
        team_meet();
        if (KEEPS && tile == work.tile) {
          kept.store(work);
          work.move_on(tile + 1);
        } else {
          work.copy(tile + 1);
        }
        work.prefetch_next(tile + 2);
      }
    }
  }
  StatePlace(x.now, work.head, work.unit).give(s.num_rows, state);
}
}  // namespace attention

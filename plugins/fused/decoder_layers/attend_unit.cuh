// Work items of attention (`unit`) in layers.cu: how a group of four warps (`team`) computes one, with the
// code of batch.cu. Each warp copies 16 keys of a tile and their values and multiplies those keys; all read
// all logits, and each multiplies a quarter of the value dimensions.
//
// The keys and values of the step's own tokens come from the blocks that compute them, all others from
// the cache; the latter are loaded before the queries are available.
#pragma once

#include "fused/decoder_layers/attend_step.cuh"

namespace attention {
// copy_or_clear_chunk that has L2 fetch the neighbouring line as well. Without that was measured for many requests alone.
DEVICE void copy_or_clear_wide(u32 target, const void* source, bool is_real) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(is_real ? 16 : 0)
               : "memory");
}

// The work item of a team, and the warp's part of its tiles. The first tile is on its way as soon as there is one.
struct Work {
  const Cached* cache;
  const int* table;
  u32 slots;
  int head, unit, tile, end, limit;
  Pages pages, ahead;  // of the tile to copy next, and of the one after it

  Work() = default;
  DEVICE Work(const Step& s, const Cached* cache_, u32 slots_, int task) {
    cache = cache_, table = s.block_tables, limit = s.limit;
    slots = slots_, head = task % HEADS, unit = task / HEADS;
    tile = unit_start(unit), end = min(unit_start(unit + 1), s.tiles);
    if (task == first_task()) {
      pages = s.pages, ahead = s.ahead;
    } else {
      pages.load(table, tile, limit);
      if (READS_AHEAD) ahead.load(table, tile + 1, limit);
    }
    copy(tile);
    if (!KEEPS) prefetch_next(tile + 1);
  }
  DEVICE u32 slot(int its) const { return slots + u32(its - tile) % SLOTS * SLOT_BYTES; }
  // The warp's keys of a tile, and their values.
  DEVICE void copy(int its) {
    const int lane = lane_id(), first = warp_of_team() * Pages::KEYS_OF_WARP + lane / CHUNKS;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
#pragma unroll
      for (int i = 0; i < Pages::KEYS_OF_WARP; i += KEY_STEP) {
        const u32 to = slot(its) + kv * TILE_BYTES + place(first + i, lane % CHUNKS);
        const Cached* from = pages.key(cache, head, its, i + lane / CHUNKS, kv);
        const bool is_real = its * KEYS + first + i < limit;
        copy_or_clear_wide(to, from + lane % CHUNKS * (16 / KV_TYPE::bytes), is_real);
      }
      commit_copies();
    }
    move_on(its);
  }
  DEVICE void move_on(int its) {
    if (READS_AHEAD) pages = ahead;
    else if (its + 1 < end) pages.load(table, its + 1, limit);
    if (READS_AHEAD && its + 2 < end) ahead.load(table, its + 2, limit);
  }
  // Prefetches to L2 what `copy` will load next, while its slot is not free yet.
  DEVICE void prefetch_next(int its) const {
    constexpr int LINES = LINE > 128 ? LINE / 128 : 1;  // lines of a key
    // With two slots the copy itself is one tile ahead; pages smaller than a warp's keys are rare.
    if (SLOTS > 1 || Pages::COUNT > 1 || its >= end) return;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
      prefetch((u64)pages.key(cache, head, its, lane_id() / 2, lane_id() % 2) + line * 128);
    }
  }
};
static_assert(2 * Pages::KEYS_OF_WARP == 32, "a lane for each key and each value");

// A work item's second tile with KEEPS: in registers, the part that a warp would copy.
struct Kept {
  static constexpr int COUNT = Pages::KEYS_OF_WARP / KEY_STEP;
  uint4 chunks[2][COUNT];

  DEVICE void load(const Work& w) {
    const int tile = w.tile + 1, lane = lane_id();
    const int first = warp_of_team() * Pages::KEYS_OF_WARP + lane / CHUNKS;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const Cached* from = w.pages.key(w.cache, w.head, tile, i * KEY_STEP + lane / CHUNKS, kv);
        chunks[kv][i] = {0, 0, 0, 0};
        if (tile * KEYS + first + i * KEY_STEP < w.limit) {
          chunks[kv][i] = look16((const u8*)(from + lane % CHUNKS * (16 / KV_TYPE::bytes)));
        }
      }
    }
  }
  DEVICE void store(const Work& w) const {
    const int lane = lane_id(), first = warp_of_team() * Pages::KEYS_OF_WARP + lane / CHUNKS;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const u32 to = w.slot(w.tile + 1) + kv * TILE_BYTES + place(first + i * KEY_STEP, lane % CHUNKS);
        store_shared16(to, chunks[kv][i]);
      }
    }
  }
};

// What other blocks compute for a team's work item in this layer: queries and, for those of the step's own
// tokens whose keys belong to the warp, a lane's chunk of keys and values. All of it is requested at once.
struct Fresh {
  uint4 chunks[TOKENS][2];
  int first_key;  // of the step's own tokens

  DEVICE bool has(const Step& s, int token, int from, int to) const {
    const u32 key = first_key + token;
    const int tile = key / KEYS;
    const bool is_mine = key % KEYS / (KEYS / TEAM) == warp_of_team() && lane_id() < CHUNKS;
    return token < s.num_tokens && is_mine && tile >= from && tile < to;
  }
  const u8 *queries, *cached;  // the lane's, of the first step and token
  const u8 *copied_queries, *copied;  // the same, fetched

  DEVICE Fresh(const Step& s, const Exchange& x, const Work& work, u32 landing) : first_key(s.limit - s.num_tokens) {
    const int row = anew(lane_id() / 4), head = work.head;
    const int at = ((row / GROUP * HEADS + head) * GROUP + row % GROUP) * SIZE + query_dimension(0, 0);
    queries = x.now + Q_AT + at * 2, cached = x.now + KV_AT + head * LINE + lane_id() * 16;
    made(queries), made(cached);  // while other values arrive
    copied_queries = queries, copied = cached;
    if (IS_FETCHED && landing) {
      copied_queries = generic(landing) + (row * SIZE + query_dimension(0, 0)) * 2;
      copied = generic(landing) + QUERY_ROWS_BYTES + lane_id() * 16;
    }
  }
  DEVICE void take(const Step& s, const Work& work, Queries& to) {
    const bool is_real = lane_id() / 4 < s.num_rows;
    const u8 *queries_at = copied_queries, *cached_at = copied;
    int apart = copied == cached ? HEADS * LINE : LINE;  // keys and values of a token
    uint2 pairs[STEPS];
    u32 missing;
    do {
      missing = 0;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const u8* from = queries_at + 16 * i * 2;
        pairs[i] = {~0u, ~0u};
        if (IS_BYTE) {
          pairs[i] = look8<IS_FETCHED>(from, is_real, pairs[i]);
        } else if (is_real) {
          pairs[i] = {look4(from), look4(from + 8 * 2)};
        }
      }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int kv = 0; kv < 2; ++kv) {
          chunks[t][kv] = {~0u, ~0u, ~0u, ~0u};
          if (has(s, t, work.tile, work.end)) {
            chunks[t][kv] = look16(cached_at + (t * 2 + kv) * (IS_FETCHED ? apart : HEADS * LINE));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < STEPS; ++i) missing |= gaps<2>(pairs[i].x) | gaps<2>(pairs[i].y);
#pragma unroll
      for (int i = 0; i < TOKENS * 2; ++i) missing |= gaps<KV_BYTES>(chunks[i / 2][i % 2]);
      apart = anew(HEADS * LINE);
      made(queries_at = queries), made(cached_at = cached);  // opaque: the first turn shall not have code of its own
    } while (missing);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      to.store(0, i, ~pairs[i].x, ~pairs[i].y);
    }
  }
  // Writes them to the keys or values of a tile.
  DEVICE void add_to(u32 slot, const Step& s, int tile, int kv) const {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (!has(s, t, tile, tile + 1)) continue;
      const uint4 x = upright_cached(chunks[t][kv]);
      const u32 to = slot + kv * TILE_BYTES + place(u32(first_key + t) % KEYS, lane_id());
      store_shared16(to, x);
    }
    __syncwarp();
  }
};

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

// is_fetched: queries, keys and values of the step's own tokens were copied, when the barrier has passed `parity`.
DEVICE void take_unit(const Step& s, const Exchange& x, const Arrivals& arrivals, Work& work,
                      float scale, const Shared& shared, bool is_fetched, u32 parity) {
  const bool has_second = work.tile + 1 < work.end;
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
  StatePlace(x.now, work.head, work.unit).give(s.num_rows, state);
}
}  // namespace attention

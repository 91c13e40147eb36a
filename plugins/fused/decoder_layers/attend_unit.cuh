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

// Prefetches to L2 the warp's keys and values of two tiles, a line by each lane.
DEVICE void prefetch_two(const Pages& pages, const Pages& ahead, const Cached* cache, int head, int tile, int end) {
  constexpr int LINES = Pages::KEYS_OF_WARP * LINE / 128;  // of a tile's keys or values
  static_assert(LINES * 128 == Pages::KEYS_OF_WARP * LINE, "whole lines");
  if (Pages::COUNT > 1 || MOST_TILES <= 2 || tile >= end) return;
#pragma unroll
  for (int i = lane_id(); i < 4 * LINES; i += 32) {
    const int t = i / (2 * LINES);
    Pages its;
    its.numbers[0] = t > 0 ? ahead.numbers[0] : pages.numbers[0];
    const Cached* from = its.key(cache, head, tile + t, 0, i / LINES % 2);
    if (tile + t < end) prefetch((u64)from + i % LINES * 128);
  }
}

// The work item of a team, and the warp's part of its tiles. The first tile is on its way as soon as there is one.
struct Work {
  const Cached* cache;
  const int* table;
  u32 slots;
  int head, unit, tile, end, limit;
  Pages pages, ahead;  // of the tile to copy next, and of the one after it

  Work() = default;
  DEVICE Work(const Step& s, const Cached* cache_, u32 slots_, int task, bool is_first) {
    cache = cache_, table = s.block_tables, limit = s.limit;
    slots = slots_, head = task % HEADS, unit = task / HEADS;
    tile = unit_start(unit), end = min(unit_start(unit + 1), s.tiles);
    if (IS_ONE_EACH || is_first) {
      pages = s.pages, ahead = s.ahead;
    } else {
      pages.load(table, tile, limit);
      if (READS_AHEAD) ahead.load(table, tile + 1, limit);
    }
    copy(tile);
    if (!KEEPS) prefetch_next(tile + 1);
  }
  DEVICE u32 slot(int its) const { return slots + u32(its - tile) % (LENDS ? 2 : SLOTS) * SLOT_BYTES; }
  // The warp's keys of a tile, and their values; with TAKES_TWO or LENDS those of the next tile, too.
  DEVICE void copy(int its) {
    const int lane = lane_id(), first = warp_of_team() * Pages::KEYS_OF_WARP + lane / CHUNKS;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
#pragma unroll
      for (int t = 0; t < (TAKES_TWO || LENDS ? 2 : 1); ++t) {
        if (t > 0 && its + t >= end) continue;
#pragma unroll
        for (int i = 0; i < Pages::KEYS_OF_WARP; i += KEY_STEP) {
          const u32 to = slot(its + t) + kv * TILE_BYTES + place(first + i, lane % CHUNKS);
          const Cached* from = (t > 0 ? ahead : pages).key(cache, head, its + t, i + lane / CHUNKS, kv);
          const bool is_real = (its + t) * KEYS + first + i < limit;
          copy_or_clear_wide(to, from + lane % CHUNKS * (16 / KV_TYPE::bytes), is_real);
        }
      }
      commit_copies();
    }
    move_on(its);
  }
  DEVICE void move_on(int its) {
    if (MOST_TILES == 1 || LENDS) return;
    if (TAKES_TWO) {
      if (its + 2 >= end) return;
      pages.load(table, its + 2, limit), ahead.load(table, its + 3, limit);
      return;
    }
    if (READS_AHEAD) pages = ahead;
    else if (its + 1 < end) pages.load(table, its + 1, limit);
    if (READS_AHEAD && its + 2 < end) ahead.load(table, its + 2, limit);
  }
  // Prefetches to L2 what `copy` will load next, while its slot is not free yet.
  DEVICE void prefetch_next(int its) const {
    constexpr int LINES = LINE > 128 ? LINE / 128 : 1;  // lines of a key
    // With two slots the copy itself is one tile ahead; pages smaller than a warp's keys are rare.
    if (SLOTS > 1 || LENDS || MOST_TILES == 1 || Pages::COUNT > 1 || its >= end) return;
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
    const int its_warp = IS_LONG ? tile % TEAM : key % KEYS / (KEYS / TEAM);
    const bool is_mine = its_warp == warp_of_team() && lane_id() < CHUNKS;
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
}  // namespace attention

// How the four producer warps of tree.cu load the tiles before the root's tile: all keys, and the thread block's part of
// the value dimensions.
#pragma once

#include "ops/paged_attention/tree/tail.cuh"

// A tile in registers: its keys, and the part's dimensions of its values. Where that is half of them, four adjacent threads
// have a key's pieces of 16 bytes, which become twice as many of an operand, and the next four those of another key, so
// that their stores fall on different banks.
struct PartTile {
  static constexpr int PER_KEY = PIECES / PARTS, STEP = THREADS / PER_KEY, COUNT = KEYS / STEP;
  static_assert(PARTS == 1 || (PER_KEY == 4 && OWN_SIZE == 64), "an operand of values");
  uint4 k[LOADS], v[COUNT];

  DEVICE void load(Loader& loader, Pages& pages, const Part& part, int tile) {
    pages.aim(loader, tile);
    loader.load(tile, 0, k);
    load_values(v, loader, pages, part, tile);
  }
  template <int N>
  static DEVICE void load_values(uint4 (&v)[N], const Loader& loader, const Pages& pages,
                                 const Part& part, int tile) {
    if constexpr (N == LOADS) {
      loader.load(tile, 1, v);
    } else {
      const int thread = thread_from_here(), key = thread / PER_KEY;
      const KV_TYPE::Storage* from = loader.cache + PAGE + part.head * (TOKENS_PER_BLOCK * SIZE) +
                                     part.nth * OWN_SIZE + thread % PER_KEY * 16;
      const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * KEYS : 0;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const int its = key + i * STEP;
        const long long page = pages.page(tile, its / SPAN);
        load_piece(v[i], from + page * (2 * PAGE) + (inside + its % SPAN) * SIZE);
      }
    }
  }
  DEVICE void stage_values(u32 target, u32 place) const {
    const int thread = thread_from_here(), key = thread / PER_KEY;
    if (PARTS > 1) place = key * 128 + ((2 * (thread % PER_KEY) ^ (key & 7)) << 4);
    stage<COUNT>(target, v, place, STEP * 128);
  }
};

// They are of earlier steps, so nothing is waited for. All their keys are there.
DEVICE void load_tiles(const Shared& shared, const Part& part, Loader& loader, Pages& pages) {
  if (part.tiles == 0) return;
  PartTile now;
  now.load(loader, pages, part, 0);
  const u32 place = own_place();
  Ring<STAGES> ring;
#pragma unroll 1
  for (int tile = 0; tile < part.tiles; ++tile, ring.advance()) {
    barrier_wait(shared.empty_keys(ring.slot), ring.parity ^ 1);
    stage(shared.keys(ring.slot), now.k, place);
    barrier_wait(shared.empty_values(ring.slot), ring.parity ^ 1);
    now.stage_values(shared.values(ring.slot), place);
    tell_tile(shared, ring.slot);
    if (tile + 1 < part.tiles) now.load(loader, pages, part, tile + 1);
  }
}

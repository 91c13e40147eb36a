// How long_batch.cu divides a context among thread blocks and warpgroups, the layout of its shared memory, and how a
// warpgroup copies its tiles.
#pragma once

#include "ops/paged_attention/long_batch/products.cuh"

constexpr int TILE_SLOTS = STREAMS * SLOTS;  // of keys, and of values

// Shared memory: what is merged of the context's beginning, and of its rows; queries; of each warpgroup logits, a ring
// of keys and one of values; by how much sums fade; whose turn it is to merge.
struct Shared {
  u32 base;

  static constexpr int STATES_AT = ROWS * SIZE * 4;
  static constexpr int FADES_AT = STATES_AT + ROWS * 8;
  static constexpr int TURNS_AT = FADES_AT + STREAMS * ROWS * 4;
  static constexpr int FREE_AT = (TURNS_AT + STREAMS * 8 + 1023) / 1024 * 1024;
  static constexpr int LOGITS_AT = FREE_AT + 2 * HALF_BYTES;
  static constexpr int RINGS_AT = LOGITS_AT + STREAMS * ROWS * LOGIT_BYTES;
  static constexpr int BYTES = RINGS_AT + 2 * TILE_SLOTS * TILE_BYTES;

  // Four sums of a thread of a warpgroup, of 64 dimensions b and rows 8 j to 8 j + 7.
  DEVICE u32 merged(int b, int j, int thread) const {
    return base + ((b * (ROWS / 8) + j) * WARPGROUP + thread) * 16;
  }
  DEVICE u32 state(int row) const { return base + STATES_AT + row * 8; }  // largest, total
  DEVICE u32 fade(int stream, int row) const { return base + FADES_AT + (stream * ROWS + row) * 4; }
  DEVICE u32 turn(int stream) const { return base + TURNS_AT + stream * 8; }
  DEVICE u32 queries() const { return base + FREE_AT; }
  DEVICE u32 logits(int stream) const { return base + LOGITS_AT + stream * (ROWS * LOGIT_BYTES); }
  DEVICE u32 keys(int stream, int slot) const {
    return base + RINGS_AT + (stream * SLOTS + slot) * TILE_BYTES;
  }
  DEVICE u32 values(int stream, int slot) const {
    return keys(stream, slot) + TILE_SLOTS * TILE_BYTES;
  }
};
static_assert(Shared::BYTES <= SHARED_BYTES, "room for all of it");

// The threads of a warpgroup.
DEVICE void meet(int stream) {
  asm volatile("barrier.sync %0, %1;" ::"r"(1 + stream), "n"(WARPGROUP) : "memory");
}

// Tiles [begin, end) of a thread block; each of its warpgroups processes every STREAMS-th work item.
struct Share {
  int begin, end, first_unit;

  static constexpr int ITEM_COST = 2, TILE_COST = 4;  // what merging a work item takes, and a tile
  DEVICE static int cost(int unit) { return TILE_COST * unit_start(unit) + ITEM_COST * unit; }
  // The first work item of a share. Of the last one, too, there is one, unless there is none at all.
  DEVICE static int border(int tiles, int nth, int count) {
    const int units = count_units(tiles), all = TILE_COST * tiles + ITEM_COST * units;
    const int target = int((long long)all * nth / count);
    int low = 0, high = max(units - 1, 0);  // the last unit that costs no more
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (cost(middle) <= target) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // Of `tiles` of a context.
  DEVICE void divide(int tiles, int nth, int count) {
    first_unit = border(tiles, nth, count);
    begin = min(unit_start(first_unit), tiles);
    end = nth + 1 == count ? tiles : min(unit_start(border(tiles, nth + 1, count)), tiles);
  }
};

// A walk through the tiles of a warpgroup.
struct Walk {
  int tile, unit, unit_end;

  DEVICE void start(int first_unit) {
    unit = first_unit;
    tile = unit_start(unit), unit_end = unit_start(unit + 1);
  }
  DEVICE void next() {
    if (++tile == unit_end) start(unit + STREAMS);
  }
};

// Threads of a warpgroup by rows: those without one copy tiles. Where half of a warpgroup's warps have rows, they are other
// ones in the next warpgroup, as warps with the same place in theirs share a scheduler.
constexpr int ROW_WARPS = (ROWS + 31) / 32;
DEVICE int own_place() {
  const int turned = ROW_WARPS == 2 ? threadIdx.x / WARPGROUP * 64 : 0;
  return (threadIdx.x + turned) % WARPGROUP;
}
constexpr int COPYING = ROW_WARPS < 4 ? WARPGROUP - 32 * ROW_WARPS : WARPGROUP;  // threads

// Copies a warpgroup's tiles to its rings: the keys of a tile together with the values of the one before.
struct TileCopier {
  static constexpr int STEP = COPYING / CHUNKS, LOADS = KEYS / STEP;  // keys at once, of a thread
  static constexpr int NUMBERS = SPAN < STEP ? LOADS : TILE_PAGES;  // pages of a thread's keys
  const KV_TYPE::Storage* source;  // a thread's chunk of the head's page 0
  const int* table;
  int num_pages, limit, end;  // of the request: pages, keys; tiles of the share
  int stream, slot;           // of the next keys
  Walk ahead;
  int before;                        // the tile whose values come next, or -1
  int pages[NUMBERS], old[NUMBERS];  // of the tile ahead, and of that one

  static DEVICE bool copies() { return own_place() >= WARPGROUP - COPYING; }
  static DEVICE int own_key() { return own_place() % COPYING / CHUNKS; }
  DEVICE void load_pages(int (&x)[NUMBERS], int tile) const {
    const int first = tile / TILES_PER_PAGE * TILE_PAGES;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      const int entry = first + (own_key() + i * (KEYS / NUMBERS)) / SPAN;
      x[i] = 0;
      if (tile < end && entry < num_pages) x[i] = load_int(table + entry);
    }
  }
  DEVICE void copy(u32 target, int tile, const int (&x)[NUMBERS], long long plane) const {
    const int key = own_key(), left = limit - tile * KEYS - key;
    const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * KEYS : 0;
    target += place(key, threadIdx.x % CHUNKS);
#pragma unroll
    for (int page = 0; page < NUMBERS; ++page) {
      const KV_TYPE::Storage* from =
          source + (long long)x[page] * (2 * PAGE) + plane +
          (inside + (NUMBERS == LOADS ? (key + page * STEP) % SPAN : key)) * SIZE;
#pragma unroll
      for (int i = 0; i < LOADS / NUMBERS; ++i) {
        const int its = (page * (LOADS / NUMBERS) + i) * STEP;
        copy_or_clear_chunk((target ^ (its % 8 << 4)) + its * LINE, from + i * (STEP * SIZE), its < left);
      }
    }
  }
  // The next group of copies.
  DEVICE void copy_next(const Shared& shared) {
    if (!copies()) return;
    if (ahead.tile < end) copy(shared.keys(stream, slot), ahead.tile, pages, 0);
    if (before >= 0) {
      copy(shared.values(stream, slot == 0 ? SLOTS - 1 : slot - 1), before, old, PAGE);
    }
    commit_copies();
    if (++slot == SLOTS) slot = 0;
    before = ahead.tile < end ? ahead.tile : -1;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) old[i] = pages[i];
    ahead.next();
    load_pages(pages, ahead.tile);
  }
  // Begins with SLOTS groups, whose pages are read together.
  DEVICE void start(const Shared& shared, int first_unit) {
    if (!copies()) return;
    int first[SLOTS][NUMBERS];
    Walk at;
    at.start(first_unit);
    ahead = at;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i, at.next()) load_pages(first[i], at.tile);
    slot = 0, before = -1;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (ahead.tile < end) copy(shared.keys(stream, i), ahead.tile, first[i], 0);
      if (i > 0 && before >= 0) copy(shared.values(stream, i - 1), before, first[i - 1], PAGE);
      commit_copies();
      before = ahead.tile < end ? ahead.tile : -1;
      ahead.next();
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) old[i] = first[SLOTS - 1][i];
    load_pages(pages, ahead.tile);
  }
};

// How long.cu divides a context among thread blocks and warpgroups, and how four warps bring its tiles.
#pragma once

#include "ops/paged_attention/chunk_rows.cuh"

constexpr int SLOTS = 4;           // tiles of keys, and of values, in shared memory
constexpr int COMPUTING = 2 * 128;  // threads
constexpr int ALL_THREADS = THREADS + COMPUTING;

// Shared memory: keys and values of each slot, their barriers, what merging needs.
struct Tiles {
  u32 base;

  static constexpr int BARRIERS_AT = 2 * SLOTS * OPERAND_BYTES;
  static constexpr int FACTORS_AT = BARRIERS_AT + 8 * (4 * SLOTS);

  DEVICE u32 keys(int slot) const { return base + slot * OPERAND_BYTES; }
  DEVICE u32 values(int slot) const { return keys(SLOTS + slot); }
  DEVICE u32 full_keys(int slot) const { return base + BARRIERS_AT + 8 * slot; }
  DEVICE u32 empty_keys(int slot) const { return full_keys(SLOTS + slot); }
  DEVICE u32 full_values(int slot) const { return full_keys(2 * SLOTS + slot); }
  DEVICE u32 empty_values(int slot) const { return full_keys(3 * SLOTS + slot); }
};

// Tiles [begin, end) of a thread block, of which both warpgroups process every one (streams is 1) or every other work
// item (streams is 2).
struct Share {
  int begin, end, first_unit, streams;

  // Of `tiles` of a context; a share begins where a work item does. What follows the tiles is the last share's, and
  // takes as long as `more` tiles.
  DEVICE void divide(int tiles, int more, int nth, int count) {
    const auto border = [&](int i) {
      const int tile = min(int((long long)(tiles + more) * i / count), tiles);
      return i == count ? tiles : unit_start(count_units(tile + 1) - 1);
    };
    begin = border(nth), end = border(nth + 1);
    first_unit = count_units(begin + 1) - 1;
  }
};

// A walk through the tiles of a share.
struct Walk {
  int tile, unit, unit_end;

  DEVICE void start(int first_unit) {
    unit = first_unit;
    tile = unit_start(unit), unit_end = unit_start(unit + 1);
  }
  DEVICE void next(int units) {  // `units`: from one work item to the next
    if (++tile == unit_end) start(unit + units);
  }
};

// The next tile that a set of registers carries: of the same warpgroup, or the one after the next.
DEVICE int tile_after(int tile, int streams) {
  if (streams == 1) return tile + 2;
  const int unit = count_units(tile + 1) - 1;
  return unit_start(unit + 1) > tile + 1 ? tile + 1 : unit_start(unit + 2);
}

// Brings a share's tiles: loads two ahead to registers, converts them there and stores them as operands.
DEVICE void bring_tiles(const Tiles& shared, Loader (&loader)[2], const Share& share, int limit,
                        int num_pages) {
  uint4 k[2][LOADS], v[2][LOADS];
  int tiles[2] = {share.begin,
                  share.streams == 1 ? share.begin + 1 : unit_start(share.first_unit + 1)};
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    if (tiles[p] < share.end) loader[p].load_pages(tiles[p], num_pages);
  }
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    if (tiles[p] >= share.end) continue;
    loader[p].load(tiles[p], 0, k[p]);
    loader[p].load(tiles[p], 1, v[p]);
    const int next = tile_after(tiles[p], share.streams);
    if (next < share.end) loader[p].load_pages(next, num_pages);
  }
  int turn = 0;
#pragma unroll 1
  for (; tiles[0] < share.end || tiles[1] < share.end; ++turn) {
    const u32 parity = turn / 2 % 2 ^ 1;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (tiles[p] >= share.end) continue;
      const int slot = p + turn % 2 * 2, left = limit - tiles[p] * KEYS;
      tiles[p] = tile_after(tiles[p], share.streams);
      const bool is_last = tiles[p] >= share.end;
      barrier_wait(shared.empty_keys(slot), parity);
      stage(shared.keys(slot), k[p]);
      tell(shared.full_keys(slot));
      if (!is_last) loader[p].load(tiles[p], 0, k[p]);
      barrier_wait(shared.empty_values(slot), parity);
      clear_from(v[p], left);
      stage(shared.values(slot), v[p]);
      tell(shared.full_values(slot));
      if (is_last) continue;
      loader[p].load(tiles[p], 1, v[p]);
      const int next = tile_after(tiles[p], share.streams);
      if (next < share.end) loader[p].load_pages(next, num_pages);
    }
  }
}

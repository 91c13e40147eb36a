// Long contexts in layers.cu: which tiles a block processes, and in which order they come through the ring. A context
// is divided into groups of eight tiles, which are whole work items: eight, four, two or one. A team processes a group
// of a KV head, four tiles at once (`quad`), so that each of its warps has a tile. The block's groups belong to its
// teams in turns, and quads of two groups alternate in the ring, so that both teams have some.
#pragma once

#include "fused/decoder_layers/attend_unit.cuh"

namespace attention {
constexpr int GROUP_TILES = 8, QUAD = TEAM;
constexpr int PER_SLOT = UNIT_BYTES / SLOT_BYTES, QUAD_SLOTS = QUAD / PER_SLOT;  // tiles of a ring unit
constexpr int CHUNKS_OF_TILE = ::CHUNKS / PER_SLOT;

struct Walk {
  int tiles, groups, count;  // count: of the block's groups
  bool is_cut;               // the last of them has one quad
  DEVICE explicit Walk(int tiles_) : tiles(tiles_), groups((tiles_ + GROUP_TILES - 1) / GROUP_TILES) {
    const int tasks = groups * HEADS - int(blockIdx.x);
    count = tasks > 0 ? (tasks + NUM_BLOCKS - 1) / NUM_BLOCKS : 0;
    is_cut = count > 0 && task(count - 1) / HEADS == groups - 1 && tiles - (groups - 1) * GROUP_TILES <= QUAD;
  }
  static DEVICE int task(int nth) { return int(blockIdx.x) + nth * NUM_BLOCKS; }
  static DEVICE int head(int nth) { return task(nth) % HEADS; }
  static DEVICE int first(int nth) { return task(nth) / HEADS * GROUP_TILES; }  // tile of the block's nth group
  DEVICE int quads(int nth) const { return is_cut && nth == count - 1 ? 1 : 2; }
  DEVICE int slots() const { return QUAD_SLOTS * (2 * count - (is_cut ? 1 : 0)); }  // of the ring, in a layer
  // The order of quads, and back.
  DEVICE int order(int nth, int quad) const {
    return nth / 2 * 4 + (nth / 2 * 2 + 1 < count ? 2 * quad + nth % 2 : quad);
  }
  DEVICE void find(int order, int& nth, int& quad) const {
    const int pair = order / 4 * 2, rest = order % 4;
    const bool is_pair = pair + 1 < count;
    nth = pair + (is_pair ? rest % 2 : 0), quad = is_pair ? rest / 2 : rest;
  }
};
}  // namespace attention

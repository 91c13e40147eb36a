// How tiles of a long context get to a block of layers.cu: through the ring, between the weights of QKV and those of the
// output projection. A unit of the ring has two or four tiles of 64 keys with their values, and each warp that copies
// has one of them, or the keys or the values of one. The copy engine brings a page's keys at once, to where attention
// reads them without conflicts: `place` is its 128-byte swizzle. So what is read from memory does not wait for queries.
#pragma once

#include "fused/decoder_layers/attend.cuh"
#include "fused/decoder_layers/copy.cuh"

#if MAX_UNITS > 32
// A warp's part of a step's tiles.
struct Tiles {
  static constexpr int PAGES = attention::TILE_PAGES, WINDOW = 32 / PAGES;  // of the ring: a lane has one of their pages
  static constexpr int IN_TILES = CHUNKS * (STAGES - 2 * attention::QUAD_SLOTS);  // as SEEN_BEFORE in units.cuh
  static constexpr int MOST = IN_FLIGHT < IN_TILES ? IN_FLIGHT : IN_TILES;
  static constexpr int ROW = 128, PAGE_ROWS = TOKENS_PER_BLOCK * attention::LINE / ROW;
  static constexpr int BOX_ROWS = attention::SPAN * attention::LINE / ROW;
  static_assert(attention::CHUNKS_OF_TILE <= 2, "a warp copies a tile, its keys or its values");
  static_assert(BOX_ROWS % 8 == 0, "whole patterns of the swizzle");
  attention::Walk walk;
  const TensorMap* map;  // of the cache as rows of 128 bytes
  const int* table;
  int limit, chunk, now, next;  // pages of a window, and of the next one

  DEVICE Tiles(const TensorMap* map_, const int* cu_q, const int* kv_lens, const int* table_, int chunk_)
      : walk(0), map(map_), table(table_), chunk(chunk_) {
    const attention::Extent extent(cu_q, kv_lens);
    walk = attention::Walk(extent.tiles);
    limit = extent.limit, next = pages(0);
  }
  // The tile that the warp copies to the layer's nth unit of the ring.
  DEVICE int tile(int nth, int& head) const {
    int group, quad;
    walk.find(nth / attention::QUAD_SLOTS, group, quad);
    head = attention::Walk::head(group);
    return attention::Walk::first(group) + quad * attention::QUAD +
           nth % attention::QUAD_SLOTS * attention::PER_SLOT + chunk / attention::CHUNKS_OF_TILE;
  }
  DEVICE int pages(int first) const {
    const int nth = first + lane_id() / PAGES;
    int head;
    const int key = nth < walk.slots() ? tile(nth, head) * attention::KEYS + lane_id() % PAGES * attention::SPAN : limit;
    return key < limit ? attention::load_int(table + key / TOKENS_PER_BLOCK) : 0;
  }
  // To the layer's nth unit of the ring. row: the cache's first of the layer.
  DEVICE void copy_tile(u32 row, u32 slot, u32 full, int nth, u64 policy) const {
    using namespace attention;
    int head;
    const int its = tile(nth, head), left = limit - its * KEYS;
    const int count = its < walk.tiles ? min((left + SPAN - 1) / SPAN, PAGES) : 0;
    const u32 to = slot + chunk / CHUNKS_OF_TILE * SLOT_BYTES;
    const int inside = TILES_PER_PAGE > 1 ? its % TILES_PER_PAGE * BOX_ROWS : 0;
    if (lane_id() == 0) barrier_expect(full, count * (2 / CHUNKS_OF_TILE * SPAN * LINE));
#pragma unroll
    for (int page = 0; page < PAGES; ++page) {
      const u32 number = __shfl_sync(~0u, now, nth % WINDOW * PAGES + page);
      if (lane_id() > 0 || page >= count) continue;
#pragma unroll
      for (int kv = 0; kv < 2; ++kv) {
        if (CHUNKS_OF_TILE > 1 && chunk % 2 != kv) continue;
        const u32 from = row + ((number * 2 + kv) * NUM_KV_HEADS + head) * PAGE_ROWS + inside;
        copy_box(to + kv * TILE_BYTES + page * (SPAN * LINE), map, 0, from, full, policy);
      }
    }
  }
  // number: of the ring's next unit. Called by all lanes of a warp that copies.
  DEVICE void copy_layer(const Shared& shared, u32 row, u32& number, u64 policy) {
    const int slots = walk.slots();
#pragma unroll 1
    for (int nth = 0; nth < slots; ++nth, ++number) {
      if (nth % WINDOW == 0) {
        now = next;
        if (slots > WINDOW) next = pages(nth + WINDOW < slots ? nth + WINDOW : 0);
      }
      const u32 slot = number % STAGES, turns = number / STAGES;
      if (lane_id() == 0) {
        if (turns > 0) barrier_wait(shared.empty + 8 * slot, (turns & 1) ^ 1);
        if (nth >= STAGES) fence_slot();
        const int behind = CHUNKS * number + chunk - MOST;
        if (behind >= 0) wait_for_chunk(shared, behind);
      }
      __syncwarp();
      copy_tile(row, shared.ring + slot * UNIT_BYTES, shared.full + 8 * (CHUNKS * slot + chunk), nth, policy);
    }
  }
};

// `copy_product` by the warp's first lane, for all of them.
template <class S, int FIRST, int IN_FIRST, int IN_REST>
DEVICE void copy_by_one(const Shared& shared, const u8* weight, int chunk, u32& number, u64 policy, u32 tiles_until) {
  if (lane_id() == 0) copy_product<S, FIRST, IN_FIRST, IN_REST>(shared, weight, chunk, number, policy, tiles_until);
  else number += Share<S>().count * S::UNITS;
  __syncwarp();
}

// `copy_all` for long contexts; called by all lanes. The first weights do not wait for the launch before.
DEVICE void copy_all_long(const Shared& shared, const Layer* layers, int num_layers, int chunk,
                          const TensorMap* map, const Cached* all_cached, const int* cu_q, const int* kv_lens,
                          const int* block_tables) {
  const u64 once = evict_first_policy();
  u32 number = 0;
  copy_by_one<QkvSize, 0, 0, IN_FLIGHT_SMALL>(shared, layers->qkv.weight, chunk, number, once, 0);
  const u8 *o = layers->o.weight, *gate_up = layers->gate_up.weight, *down = layers->down.weight;
  const Cached* cache = layers->cache;
  wait_for_dependencies();
  Tiles tiles(map, cu_q, kv_lens, block_tables, chunk);
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l) {
    const Layer* next = layers + min(l + 1, num_layers - 1);  // a layer ahead, so that nothing waits for an address
    const u8 *next_qkv = next->qkv.weight, *next_o = next->o.weight, *next_gate_up = next->gate_up.weight;
    const u8* next_down = next->down.weight;
    const Cached* next_cache = next->cache;
    tiles.copy_layer(shared, u32((u64(cache) - u64(all_cached)) / Tiles::ROW), number, once);
    const u32 until = number;
    copy_by_one<OSize, 0, 0, IN_FLIGHT_SMALL>(shared, o, chunk, number, once, until);
    copy_by_one<GateUpSize, STAGES, IN_FLIGHT_AHEAD, IN_FLIGHT>(shared, gate_up, chunk, number, once, until);
    copy_by_one<DownSize, 0, 0, IN_FLIGHT>(shared, down, chunk, number, once, until);
    if (l + 1 == num_layers) break;
    copy_by_one<QkvSize, 0, 0, IN_FLIGHT_SMALL>(shared, next_qkv, chunk, number, once, until);
    o = next_o, gate_up = next_gate_up, down = next_down, cache = next_cache;
  }
}
#endif

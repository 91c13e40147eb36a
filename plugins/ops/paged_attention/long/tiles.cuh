// How long.cu divides a context among thread blocks, where things are in shared memory, and how four warps bring
// tiles: bytes are copied to where the thread that asked for them finds them again, so nobody waits for anybody else's,
// and as many tiles are on their way as there is room for.
#pragma once

#include "ops/paged_attention/chunk/rows.cuh"

constexpr int COMPUTING = 128 * WARPGROUPS;  // threads
constexpr int ALL_THREADS = THREADS + COMPUTING;
constexpr int HALF_TILE = KEYS * SIZE;       // bytes of a tile's keys, or of its values
static_assert(KV_TYPE::bytes == 1, "converted in registers");
// Shared memory: keys and values as operands, tiles as the cache has them, queries of each warpgroup, barriers.
struct Tiles {
  u32 base;

  static constexpr int BYTES_AT = 2 * STAGES * OPERAND_BYTES;
  static constexpr int QUERIES_AT = BYTES_AT + BYTE_SLOTS * 2 * HALF_TILE;
  static constexpr int BARRIERS_AT = QUERIES_AT + WARPGROUPS * OPERAND_BYTES;
  static constexpr int FACTORS_AT = QUERIES_AT;  // of merging, when queries are no longer needed
  static constexpr int BYTES = BARRIERS_AT + 8 * (4 * STAGES);

  DEVICE u32 keys(int slot) const { return base + slot * OPERAND_BYTES; }
  DEVICE u32 values(int slot) const { return keys(STAGES + slot); }
  DEVICE u32 bytes(int slot) const { return base + BYTES_AT + slot * (2 * HALF_TILE); }
  DEVICE u32 queries(int warpgroup) const { return base + QUERIES_AT + warpgroup * OPERAND_BYTES; }
  DEVICE u32 full_keys(int slot) const { return base + BARRIERS_AT + 8 * slot; }
  DEVICE u32 empty_keys(int slot) const { return full_keys(STAGES + slot); }
  DEVICE u32 full_values(int slot) const { return full_keys(2 * STAGES + slot); }
  DEVICE u32 empty_values(int slot) const { return full_keys(3 * STAGES + slot); }
};
static_assert(Tiles::BYTES <= SHARED_BYTES, "room for all of it");

// Tiles [begin, end) of a thread block.
struct Share {
  int begin, end, first_unit;

  // Where share `nth` of `count` begins, of `tiles` of a context: where a work item does. What follows the tiles is the
  // last share's, and takes as long as `more` tiles.
  DEVICE static int border(int tiles, int more, int nth, int count) {
    const int tile = min(int((long long)(tiles + more) * nth / count), tiles);
    return nth == count ? tiles : unit_start(count_units(tile + 1) - 1);
  }
  DEVICE void divide(int tiles, int more, int nth, int count) {
    begin = border(tiles, more, nth, count), end = border(tiles, more, nth + 1, count);
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
  DEVICE void next() {
    if (++tile == unit_end) start(unit + 1);
  }
};

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies a thread's pieces of a tile's keys and values to `to`: its own 16 bytes of each 2 KB. Tiles from `own_tiles` on have
// keys of this step, which the kernel before may still be writing.
DEVICE void fetch(const Loader& loader, int tile, int own_tiles, u32 to) {
  if (tile >= own_tiles) wait_for_dependencies();
  loader.fetch(tile, to, to + HALF_TILE);
}
DEVICE void take(uint4 (&x)[LOADS], u32 from) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                 : "r"(from + i * (THREADS * 16))
                 : "memory");
  }
}

// Directs a loader to a tile's pages.
DEVICE void aim(Loader& loader, Pages& pages, int tile) {
  pages.reach(tile);
  const u32 entry = Pages::entry_of(tile);  // the remainder of a number without a sign is one instruction
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) {
    loader.pages[i] = __shfl_sync(~0u, pages.own, (entry + Loader::nth_page(i)) % 32);
  }
}

// Brings a share's tiles; those of earlier steps may come before the kernel before has ended.
DEVICE void bring_tiles(const Tiles& shared, Loader& loader, Pages& pages, const Share& share,
                        int limit, int own_tiles) {
  u32 own_bytes = threadIdx.x * 16;  // the thread's place in a slot
  asm volatile("" : "+r"(own_bytes));  // kept: its number takes longer to read again
  pages.start(share.begin);
#pragma unroll 1  // instructions that run once take longer to arrive than to run
  for (int i = 0; i < BYTE_SLOTS; ++i) {
    if (share.begin + i < share.end) {
      aim(loader, pages, share.begin + i);
      fetch(loader, share.begin + i, own_tiles, shared.bytes(i) + own_bytes);
    }
    commit_copies();
  }
  const u32 place = own_place();
  Ring<STAGES> operands;  // of keys, and of values
  int slot = 0;
#pragma unroll 1
  for (int tile = share.begin; tile < share.end; ++tile) {
    const u32 own = shared.bytes(BYTE_SLOTS == STAGES ? operands.slot : slot) + own_bytes;
    uint4 x[LOADS];
    wait_for_copies<BYTE_SLOTS - 1>();
    take(x, own);
    barrier_wait(shared.empty_keys(operands.slot), operands.parity ^ 1);
    stage(shared.keys(operands.slot), x, place);
    shared_fence();
    tell(shared.full_keys(operands.slot));
    take(x, own + HALF_TILE);
    clear_from(x, limit - tile * KEYS);
    barrier_wait(shared.empty_values(operands.slot), operands.parity ^ 1);
    stage(shared.values(operands.slot), x, place);
    shared_fence();
    tell(shared.full_values(operands.slot));
    operands.advance();
    const int next = tile + BYTE_SLOTS;
    if (next < share.end) {
      aim(loader, pages, next);
      fetch(loader, next, own_tiles, own);
    }
    commit_copies();
    if (BYTE_SLOTS != STAGES && ++slot == BYTE_SLOTS) slot = 0;
  }
}

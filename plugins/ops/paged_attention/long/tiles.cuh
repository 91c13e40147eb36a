// How long.cu divides a context among thread blocks, the layout of its shared memory, and how the four producer warps load
// tiles, some of them keys, the others values. Bytes are copied to where the thread that requested them reads them again,
// and as many tiles are in flight as there is room for.
#pragma once

#include "ops/paged_attention/chunk/rows.cuh"
#include "ops/paged_attention/long/share.cuh"

constexpr int COMPUTING = 128 * WARPGROUPS;  // threads
constexpr int ALL_THREADS = THREADS + COMPUTING;
constexpr int HALF_TILE = KEYS * SIZE;       // bytes of a tile's keys, or of its values
static_assert(KV_TYPE::bytes == 1, "converted in registers");
// Two warps bring a tile's keys and two its values; of trees' tiles, which take longest to convert beside 128 rows, one warp
// each, of every second. What a warp does once a tile takes longer than to convert its bytes: waits, and a fence, which also waits for
// copies that the warp has just asked for.
constexpr int TOGETHER = WARPGROUPS == 1 || !TREE ? 2 : 1, EVERY = 2 / TOGETHER;
// Whether thread blocks behind those of all contexts help two contexts each with their beginnings (shares.cuh).
constexpr bool HELPS = WARPGROUPS == 2 && !TREE && !ALONE && HEADS % 2 == 0;
constexpr bool GOES_ON = ALONE || HELPS;  // a thread block may have shares of several contexts
constexpr int COPY_STEP = KEY_STEP * TOGETHER / 4;  // keys that such warps copy at once
constexpr int COPIES = KEYS / COPY_STEP;            // of a thread
static_assert(SPAN >= COPY_STEP, "keys that are copied at once are of one page");
static_assert(BYTE_SLOTS % EVERY == 0 && STAGES == 2, "a warp has all slots, or every second");

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

  DEVICE void init_barriers() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full_keys(i), TOGETHER);
      barrier_init(full_values(i), TOGETHER);
      barrier_init(empty_keys(i), COMPUTING / 32);
      barrier_init(empty_values(i), COMPUTING / 32);
    }
    barrier_init_fence();
  }
};
static_assert(Tiles::BYTES <= SHARED_BYTES, "room for all of it");

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

// Brings the tiles of a thread block. Of the keys that are copied at once a thread has the pieces that it has of those that
// all four warps copy (own_piece, own_key).
struct Bringer {
  Tiles shared;
  const KV_TYPE::Storage* source;  // of page 0: the KV head's keys or values, the thread's piece
  Pages pages;
  u32 own_bytes, place;  // the thread's places in a slot as the cache has it, and in an operand
  bool has_values;
  int slot;  // of operands
  u32 parity;

  DEVICE explicit Bringer(const Tiles& shared_) : shared(shared_), slot(0), parity(1) {
    const u32 thread = thread_from_here(), key = own_key(thread) % COPY_STEP, part = 2 * own_piece(thread);
    has_values = __any_sync(~0u, thread >= THREADS / 2);
    if (EVERY > 1) slot = __any_sync(~0u, thread % 64 >= 32);
    // A key's eight pieces are a line of memory, which arrives at once: they lie side by side, of every second key the other half
    // first, as eight threads have four pieces each of two keys.
    own_bytes = key * SIZE + ((own_piece(thread) ^ key % 2 * 4) << 4) + (has_values ? HALF_TILE : 0);
    place = part / 8 * HALF_BYTES + key * 128 + ((part % 8 ^ key) << 4);
    asm volatile("" : "+r"(own_bytes), "+r"(place));  // kept: the thread's number takes longer to read again
  }
  DEVICE void aim(const KV_TYPE::Storage* cache, int head, const int* table, int limit) {
    const u32 thread = thread_from_here();
    source = cache + head * (TOKENS_PER_BLOCK * SIZE) + own_key(thread) % COPY_STEP * SIZE + own_piece(thread) * 16;
    if (has_values) source += PAGE;
    pages.table = table, pages.count = pages_of(limit);
  }
  // Brings a share's tiles. Those from own_tiles on have keys of this step, which the kernel before may still be writing.
  DEVICE void bring(const Share& share, int limit, int own_tiles) {
    if (share.begin >= share.end) return;
    const auto fetch_next = [&](int tile, u32 to) {
      if (tile < share.end) {
        if (tile >= own_tiles) wait_for_dependencies();
        fetch(tile, to);
      }
      commit_copies();
    };
    pages.start(share.begin);
    const u32 first = shared.bytes(EVERY > 1 ? slot : 0) + own_bytes;
#pragma unroll 1  // instructions that run once take longer to arrive than to run
    for (int i = 0; i < BYTE_SLOTS; i += EVERY) {
      fetch_next(share.begin + (EVERY > 1 ? slot : 0) + i, first + i * (2 * HALF_TILE));
    }
    const u32 full = shared.full_keys(has_values ? 2 * STAGES : 0);
    const u32 operand = has_values ? shared.values(0) : shared.keys(0);
    const auto pass_slot = [&] {
      tell(full + 8 * slot);
      if (EVERY == 1) slot ^= 1;
      if (EVERY > 1 || slot == 0) parity ^= 1;
    };
    u32 own = first;
#pragma unroll 1
    for (int tile = share.begin + (EVERY > 1 ? slot : 0); tile < share.end; tile += EVERY) {
      wait_for_copies<BYTE_SLOTS / EVERY - 1>();
      convert(own, operand + slot * OPERAND_BYTES, full + 8 * (STAGES + slot), limit - tile * KEYS);
      shared_fence();
      pass_slot();
      fetch_next(tile + BYTE_SLOTS, own);
      own += EVERY * (2 * HALF_TILE);
      if (own - first == BYTE_SLOTS * (2 * HALF_TILE)) own = first;
    }
    if (GOES_ON && slot == 1) {  // those who compute begin with the first slot again
      barrier_wait(full + 8 * (STAGES + slot), parity);
      pass_slot();
    }
  }
  static_assert(!GOES_ON || EVERY == 1, "all warps have the last tile");

 private:
  DEVICE void fetch(int tile, u32 to) {
    asm volatile("" : "+r"(to));  // a register of the lane's own, as batch/warp.cuh has it
    pages.reach(tile);
    const u32 entry = Pages::entry_of(tile);
    const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * (KEYS * SIZE) : 0;
#pragma unroll
    for (int page = 0; page < TILE_PAGES; ++page) {
      const long long number = __shfl_sync(~0u, pages.own, (entry + page) % 32);
      const KV_TYPE::Storage* from = source + number * (2 * PAGE) + inside;
      asm volatile("" : "+l"(from));  // one address a page; the rest are constant distances
#pragma unroll
      for (int i = 0; i < SPAN / COPY_STEP; ++i) {
        stream_chunk(to + (page * (SPAN / COPY_STEP) + i) * (COPY_STEP * SIZE), from + i * (COPY_STEP * SIZE));
      }
    }
  }
  // Converts the thread's bytes of a tile's keys or values to an operand, when its slot is empty. `left`: keys from
  // the tile's first on.
  DEVICE void convert(u32 own, u32 to, u32 empty, int left) const {
#pragma unroll
    for (int some = 0; some < COPIES; some += 4) {  // four at a time, of which there are registers
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                     : "r"(own + (some + i) * (COPY_STEP * SIZE))
                     : "memory");
      }
      if (has_values && left < KEYS) {  // a NaN times a weight of zero would still be a NaN
        const int key = own_key(thread_from_here()) % COPY_STEP;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + (some + i) * COPY_STEP >= left) x[i] = {0, 0, 0, 0};
        }
      }
      if (some == 0) barrier_wait(empty, parity);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 one[1] = {x[i]};
        stage(to + (some + i) * (COPY_STEP * 128), one, place ^ i * COPY_STEP % 8 << 4);
      }
    }
  }
};

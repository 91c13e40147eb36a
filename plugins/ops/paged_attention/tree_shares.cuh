// How the thread blocks of a cluster share the tiles before the root in tree.cu, if SPLITS is 2: each attends to every
// second work item (`unit`) and merges one half of the dimensions of all of them. So each sends the other half of its own
// work items to the other, warp by warp: from registers to its own shared memory, and by a bulk copy to one of two slots
// of the other. (Stores to the other's shared memory, 14 bytes a cycle, kept the warps that compute waiting.)
//
// What a thread block has of a work item is merged one work item later, when the other's has arrived. A slot is free
// again when the other block's next work item has arrived: that was sent after the slot had been read. What has been
// sent is written over when the other block has said that it arrived.
#pragma once

#include "backends/cuda/sm90/cluster.cuh"
#include "ops/paged_attention/chunk_rows.cuh"

constexpr int OWN = SIZE / 2 / SPLITS;  // values of a thread that its thread block merges
static_assert(SPLITS == 1 || SPLITS == 2, "two halves of the dimensions");

// A walk through a thread block's tiles: first the root's work item as far as it lies before the root's tile, which all
// go through and others go on with; then every SPLITSth one before it.
struct OwnTiles {
  int tiles, root_unit;  // before the root's tile; the work item of the root
  int unit, tile, unit_end, next_unit;

  DEVICE OwnTiles(int tiles_, int root_unit_, int rank)
      : tiles(tiles_), root_unit(root_unit_), next_unit(rank) {
    if (unit_start(root_unit) < tiles) begin(root_unit);
    else begin_next();
  }
  DEVICE void begin(int unit_) {
    unit = unit_, tile = unit_start(unit), unit_end = min(unit_start(unit + 1), tiles);
  }
  DEVICE void begin_next() {
    if (next_unit < root_unit) begin(next_unit);
    else tile = tiles;
    next_unit += SPLITS;
  }
  DEVICE bool is_over() const { return tile >= tiles; }
  // To the next tile; whether that begins a work item.
  DEVICE bool next() {
    if (++tile < unit_end) return false;
    begin_next();
    return true;
  }
};

// What is merged of a thread's rows.
struct Merged {
  float largest[2], total[2];
  float acc[OWN];

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < OWN; ++i) acc[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = minus_infinity(), total[r] = 0.0f;
  }
};

// Of the sums of a work item those that block `half` of a cluster merges.
DEVICE float of_half(const float (&acc)[SIZE / 2], int half, int i) {
  return SPLITS == 1 || half == 0 ? acc[i] : acc[SIZE / 2 - OWN + i];
}

DEVICE void store_two(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

#if SPLITS == 1

struct Merging {
  Merged all;
  DEVICE Merging(u32, u32, u32, int, int) { all.clear(); }
  DEVICE void take(const float (&acc)[SIZE / 2], const float (&largest)[2], const float (&total)[2]) {
    merge(all, acc, largest, total);
  }
  DEVICE void finish() {}
};
constexpr int SENT_BYTES = 0;
DEVICE void begin_barriers(u32) {}

#else

constexpr int WARP_SUMS = OWN * 32 * 4;         // bytes that a warp sends of a work item: of each lane its sums,
constexpr int WARP_BYTES = WARP_SUMS + 16 * 8;  // and a largest and a total of each row
constexpr int SENT_BYTES = 4 * WARP_BYTES;

DEVICE void load_pair(u32 address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}
DEVICE void load_four(u32 address, float (&x)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

DEVICE void store_four(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// Barriers of each of four warps: of its two slots, which expect the first work items, and of what it has sent.
DEVICE void begin_barriers(u32 barriers) {
  for (int i = 0; i < 12; ++i) barrier_init(barriers + 8 * i, 1);
  for (int i = 0; i < 8; ++i) barrier_expect(barriers + 8 * i, WARP_BYTES);
}

struct Merging {
  Merged all;
  u32 slots, sending, barriers;
  int rank, units, count;  // work items that end before the root's tile; of them taken by this block
  float held[OWN], held_largest[2], held_total[2];  // the last of these, not yet merged

  // Slots of two work items and what is being sent of one: addresses of the block's.
  DEVICE Merging(u32 slots_, u32 sending_, u32 barriers_, int rank_, int units_)
      : slots(slots_), sending(sending_), barriers(barriers_), rank(rank_), units(units_), count(0) {
    all.clear();
  }
  static DEVICE int warp() { return thread_from_here() / 32 % 4; }
  static DEVICE int state_at(int r) { return WARP_SUMS + (lane_id() / 4 + 8 * r) * 8; }
  DEVICE u32 slot(int nth) const { return slots + nth % 2 * SENT_BYTES + warp() * WARP_BYTES; }
  DEVICE u32 has_come(int nth) const { return barriers + 8 * (nth % 2 * 4 + warp()); }
  DEVICE u32 has_gone() const { return barriers + 8 * (8 + warp()); }

  // Sends the other block its half of this block's nth work item.
  DEVICE void send(int nth, const float (&acc)[SIZE / 2], const float (&largest)[2],
                   const float (&total)[2]) const {
    if (nth > 0) barrier_wait(has_gone(), (nth - 1) % 2);
    const u32 from = sending + warp() * WARP_BYTES;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      store_four(from + (i / 4 * 32 + lane_id()) * 16, of_half(acc, rank ^ 1, i),
                 of_half(acc, rank ^ 1, i + 1), of_half(acc, rank ^ 1, i + 2),
                 of_half(acc, rank ^ 1, i + 3));
    }
    if (lane_id() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_two(from + state_at(r), largest[r], total[r]);
    }
    shared_fence();  // written by threads, read by the copy engine
    __syncwarp();
    if (lane_id() == 0) {
      copy_to_block(remote_address(slot(nth), rank ^ 1), from, WARP_BYTES,
                    remote_address(has_come(nth), rank ^ 1));
    }
  }
  DEVICE void merge_received(int nth) {
    const u32 from = slot(nth), its = has_come(nth);
    barrier_wait_cluster(its, nth / 2 % 2);
    if (lane_id() == 0) barrier_arrive_remote(remote_address(has_gone(), rank ^ 1));
    float largest[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) load_pair(from + state_at(r), largest[r], total[r]);
    const Factors factors(all, largest, total);
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      float x[4];
      load_four(from + (i / 4 * 32 + lane_id()) * 16, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) factors.append(all.acc[i + j], i + j, x[j]);
    }
    __syncwarp();
    if (lane_id() == 0) barrier_expect(its, WARP_BYTES);
  }
  // The nth work items of both blocks, in order.
  DEVICE void merge_both(int nth) {
    if (rank == 1) merge_received(nth);
    merge(all, held, held_largest, held_total);
    if (rank == 0) merge_received(nth);
  }
  DEVICE void take(const float (&acc)[SIZE / 2], const float (&largest)[2], const float (&total)[2]) {
    if (count > 0) merge_both(count - 1);
    send(count, acc, largest, total);
    ++count;
#pragma unroll
    for (int i = 0; i < OWN; ++i) held[i] = of_half(acc, rank, i);
#pragma unroll
    for (int r = 0; r < 2; ++r) held_largest[r] = largest[r], held_total[r] = total[r];
  }
  // Merges what is left of both. Then all that was sent has arrived.
  DEVICE void finish() {
    const int others = (units + rank) / 2;
    if (count > 0 && others >= count) merge_both(count - 1);
    else if (count > 0) merge(all, held, held_largest, held_total);
    if (others > count) merge_received(count);
    if (count > 0) barrier_wait(has_gone(), (count - 1) % 2);
  }
};

#endif

// Brings the keys and values of a walk's tiles, all of which are whole. The loader has the first one's pages.
DEVICE void bring_tiles(const Shared& shared, Loader& loader, OwnTiles next, int pages) {
  if (next.is_over()) return;
  uint4 k[LOADS], v[LOADS];
  const auto load = [&] {
    loader.load(next.tile, k, v);
    next.next();
    if (!next.is_over()) loader.load_pages(next.tile, pages);
  };
  const u32 place = own_place();
  Ring<STAGES> ring;
  load();
#pragma unroll 1
  for (bool is_last = false; !is_last; ring.advance()) {
    barrier_wait(shared.empty_keys(ring.slot), ring.parity ^ 1);
    stage(shared.keys(ring.slot), k, place);
    barrier_wait(shared.empty_values(ring.slot), ring.parity ^ 1);
    stage(shared.values(ring.slot), v, place);
    tell_tile(shared, ring.slot);
    is_last = next.is_over();
    if (!is_last) load();
  }
}

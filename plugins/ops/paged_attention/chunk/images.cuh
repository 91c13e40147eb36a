// Tiles of chunk.cu that images.cu has written as operands: one thread copies them.
#pragma once

#include "ops/paged_attention/chunk/load.cuh"
#include "ops/paged_attention/chunk/image_places.cuh"

// Copies an operand; both addresses are multiples of 16.
DEVICE void copy_operand(u32 target, const u8* from, u32 barrier) {
  barrier_expect(barrier, IMAGE_BYTES);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          target),
      "l"(from), "r"(IMAGE_BYTES), "r"(barrier)
      : "memory");
}

struct Imaged {
  Images images;
  const u8* from;  // the item's next tile

  DEVICE int most_keys() const { return images.tiles * KEYS; }
  DEVICE void aim(const Shared& shared, const Step& step, int request, int head, int) {
    from = images.of(nth_chunk(shared, request), 0, head - step.first_head);
  }
  DEVICE void begin(const Item&) {}
  DEVICE void bring(const Shared& shared, const Item& item, Ring<STAGES>& ring) {
    if (threadIdx.x > 0) return;  // the ring's position is that thread's alone
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile, ring.advance()) {
      barrier_wait(shared.empty_keys(ring.slot), ring.parity ^ 1);
      copy_operand(shared.keys(ring.slot), from, shared.full_keys(ring.slot));
      barrier_wait(shared.empty_values(ring.slot), ring.parity ^ 1);
      copy_operand(shared.values(ring.slot), from + IMAGE_BYTES, shared.full_values(ring.slot));
      from += images.heads * (2 * IMAGE_BYTES);
    }
  }
};

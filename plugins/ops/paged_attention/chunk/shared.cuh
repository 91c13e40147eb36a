// The layout of a thread block's shared memory in chunk.cu, chunk_fp8.cu and tree.cu.
#pragma once

#include "ops/paged_attention/shared/operands.cuh"

#ifndef ENDS
#define ENDS 0
#endif
#ifndef HAS_CONTEXT
#define HAS_CONTEXT FP8_PRODUCTS  // whether some of a prompt's tokens have FP8 products and the others have not
#endif
constexpr int TOKENS = 64 * WARPGROUPS / GROUP;  // of an item
// FP8 products have queries in registers alone, and one more dimension of values: ones, whose sum is that of weights.
constexpr int QUERY_BYTES = FP8_PRODUCTS ? 0 : OPERAND_BYTES;
constexpr int VALUES_BYTES = IMAGE_BYTES / PARTS + (FP8_PRODUCTS ? 1024 : 0);

// Some query tokens of one request, for one KV head.
struct Item {
  int head, token, rows;  // `token` counts from the step's first
  int full_tiles, tiles;  // all rows see all keys of the tiles before full_tiles; 0 tiles: no item
  int limit;              // keys
};

// What a step says of a request, and where its items start, in blocks of TOKENS.
struct Request {
  int start, end, limit, first_block;
};

// Shared memory: queries of two items, a ring of keys and one of values, barriers, two items, the
// block's next item, and the step's requests plus one entry after the last.
struct Shared {
  u32 base;
  u8* memory;

  static constexpr int RING_AT = 2 * WARPGROUPS * QUERY_BYTES;
  static constexpr int BARRIERS_AT = RING_AT + STAGES * (IMAGE_BYTES + VALUES_BYTES);
  static constexpr int ITEMS_AT = BARRIERS_AT + 8 * (4 * STAGES + 4);
  static constexpr int CLAIM_AT = ITEMS_AT + 2 * sizeof(Item);

#if !FP8_PRODUCTS
  DEVICE u32 queries(int slot, int warpgroup) const { return base + (slot * WARPGROUPS + warpgroup) * QUERY_BYTES; }
#endif
  DEVICE u32 keys(int slot) const { return base + RING_AT + slot * IMAGE_BYTES; }
  DEVICE u32 values(int slot) const { return keys(STAGES) + slot * VALUES_BYTES; }
  DEVICE u32 full_keys(int slot) const { return base + BARRIERS_AT + 8 * slot; }
  DEVICE u32 empty_keys(int slot) const { return full_keys(STAGES + slot); }
  DEVICE u32 full_values(int slot) const { return full_keys(2 * STAGES + slot); }
  DEVICE u32 empty_values(int slot) const { return full_keys(3 * STAGES + slot); }
  DEVICE u32 full_item(int slot) const { return full_keys(4 * STAGES + slot); }
  DEVICE u32 empty_item(int slot) const { return full_keys(4 * STAGES + 2 + slot); }
  DEVICE volatile Item& item(int slot) const { return ((volatile Item*)(memory + ITEMS_AT))[slot]; }
  DEVICE volatile int& claim() const { return *(volatile int*)(memory + CLAIM_AT); }
  DEVICE volatile Request& request(int i) const {
    return ((volatile Request*)(memory + CLAIM_AT + 16))[i];
  }
};

// Before the block meets. bringers: arrivals that a full tile waits for.
DEVICE void init_barriers(const Shared& shared, int bringers) {
  if (threadIdx.x > 0) return;
  for (int i = 0; i < STAGES; ++i) {
    barrier_init(shared.full_keys(i), bringers);
    barrier_init(shared.full_values(i), bringers);
    barrier_init(shared.empty_keys(i), 4 * WARPGROUPS);
    barrier_init(shared.empty_values(i), 4 * WARPGROUPS);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(shared.full_item(i), THREADS / 32);
    barrier_init(shared.empty_item(i), 4 * WARPGROUPS);
  }
  barrier_init_fence();
}

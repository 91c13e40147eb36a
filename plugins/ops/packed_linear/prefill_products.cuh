// Products of one warpgroup of the kernel for many tokens, chunk by chunk from the rings.
#pragma once

#include "ops/packed_linear/prefill_load.cuh"

DEVICE void clear(float (&sum)[TILE_TOKENS / 2]) {  // to the value whose addition changes nothing
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = -0.0f;
}

DEVICE void add(float (&sum)[TILE_TOKENS / 2], const float (&part)[TILE_TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
}

// One warpgroup's position in the rings. A slot is released when the products that read it are
// done, which is known one chunk later.
struct Consumer {
  const Shared& shared;
  int warpgroup;
  Ring<A_STAGES> a, a_done;  // next to multiply, next to release
  Ring<B_STAGES> b, b_done;

  DEVICE void release_a(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.a_empty + 8 * slot);
  }
  DEVICE void release_b(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.b_empty + 8 * slot);
  }

  // 64 rows x TILE_TOKENS tokens x one chunk, added to `sum` or replacing it.
  DEVICE void multiply(float (&sum)[TILE_TOKENS / 2], bool is_first) const {
    const u64 rows = operand(shared.a + a.slot * A_BYTES + warpgroup * BLOCK_BYTES);
    const u64 tokens = operand(shared.b + (ONE_RING ? a.slot : b.slot) * B_BYTES);
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Product<INPUT_TYPE, TILE_TOKENS>::add(sum, rows + 2 * k, tokens + 2 * k, k > 0 || !is_first);
    }
    product_commit();
  }

  DEVICE void release(bool is_last) {
    release_a(a_done.slot);
    a_done.advance();
    if (!ONE_RING && is_last) {
      release_b(b_done.slot);
      b_done.advance();
    }
  }

  // Begins part = 64 rows x TILE_TOKENS tokens x `count` chunks. The first row tile waits for the
  // tokens, the last one releases them. Slots are released one product later or, with `hold`, in
  // `end`: then all products run while the caller does other work.
  DEVICE void begin(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
#pragma unroll 1
    for (int chunk = 0; chunk < count; ++chunk) {
      if (!ONE_RING && tile == 0) barrier_wait(shared.b_full + 8 * b.slot, b.parity);
      barrier_wait(shared.a_full + 8 * a.slot, a.parity);
      multiply(part, chunk == 0);
      if (chunk > 0 && !hold) {
        product_wait<1>();
        release(tile == LAST);
      }
      a.advance();
      b.advance();
    }
  }
  DEVICE void end(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
    product_wait<0>();
    keep_order(part);
    const int left = hold ? count : 1;
#pragma unroll 1
    for (int i = 0; i < left; ++i) release(tile == LAST);
  }

  // Begins `part` and adds `before`, which was begun before it, while its first products run.
  DEVICE void follow(float (&part)[TILE_TOKENS / 2], float (&before)[TILE_TOKENS / 2],
                     float (&sum)[TILE_TOKENS / 2], int count) {
    next_chunk(part, true);
    add_done(before, sum);
#pragma unroll 1
    for (int chunk = 1; chunk < count; ++chunk) {
      next_chunk(part, false);
      release(true);
    }
  }
  // No wait depends on a condition: else the compiler has every product waited for.
  DEVICE void next_chunk(float (&part)[TILE_TOKENS / 2], bool is_first) {
    barrier_wait(shared.a_full + 8 * a.slot, a.parity);
    multiply(part, is_first);
    product_wait<1>();
    a.advance();
  }
  DEVICE void add_done(float (&part)[TILE_TOKENS / 2], float (&sum)[TILE_TOKENS / 2]) {
    keep_order(part);
    release(true);
    add(sum, part);
  }

  DEVICE void next_product(float (&sum)[TILE_TOKENS / 2], int tile, bool is_first) {
    if (!ONE_RING && tile == 0) barrier_wait(shared.b_full + 8 * b.slot, b.parity);
    barrier_wait(shared.a_full + 8 * a.slot, a.parity);
    multiply(sum, is_first);
    a.advance();
  }

  // Chunks of a chain per row tile, which begins with them or goes on. The first chunk is apart: the compiler would
  // have every product of sums waited for that have a value before the loop.
  DEVICE void chains(float (&sum)[WG_TILES][TILE_TOKENS / 2], int chunks, bool is_new) {
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) {
      next_product(sum[tile], tile, is_new);
      if (tile > 0) {
        product_wait<1>();
        release(false);
      }
    }
    b.advance();
#pragma unroll 1
    for (int chunk = 1; chunk < chunks; ++chunk) {
#pragma unroll
      for (int tile = 0; tile < WG_TILES; ++tile) {
        next_product(sum[tile], tile, false);
        product_wait<1>();
        release(tile == 0);  // of the previous product, which was the last of its chunk if this is
      }                      // the first of the next
      b.advance();
    }
    product_wait<0>();
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) keep_order(sum[tile]);
    release(true);
  }
};

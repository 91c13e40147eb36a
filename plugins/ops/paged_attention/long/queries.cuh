// A warpgroup's queries in long.cu, and their products with a tile's keys.
#pragma once

#include "ops/paged_attention/long/tiles.cuh"

// Of the products along a head, those whose queries are in registers, in the binary for many requests.
constexpr int QUERY_STEPS = ALONE ? 2 : 0;

// A warpgroup's queries as its products take them: as shared memory is what most of a tile's work passes through, some
// are in registers, where there are any left.
struct Queries {
  static constexpr int KEPT = QUERY_STEPS;
  u32 at;
  u32 steps[KEPT + !KEPT][4];

  // The warp's 16 rows, when all have been staged.
  DEVICE explicit Queries(u32 address) : at(address) {
    const int lane = lane_id(), row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const int piece = 2 * i + lane / 16;
      u32(&x)[4] = steps[i];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at + piece / 8 * HALF_BYTES + row * 128 + ((piece % 8 ^ (row & 7)) << 4))
                   : "memory");
    }
  }
};

// As `start_logits`, but places in the operands are found one after another: all of them at once, before the loop, take
// more of the registers that a warp's lanes share than there are. Operands of all places have the same upper half.
constexpr u32 OPERAND_HIGH = 1024 >> 4 | 1 << 30;
template <class Its>
DEVICE void start_logits_in_turn(float (&s)[32], const Its& queries, u32 keys) {
  u32 a = u32(operand(queries.at)), b = u32(operand(keys));
  const auto whole = [](u32 low) {
    u64 x;
    asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low), "r"(OPERAND_HIGH));
    return x;
  };
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    if (i < Its::KEPT) {
      Attention<Inner>::logits(s, queries.steps[i], whole(b), i > 0);
    } else {
      Attention<Inner>::logits(s, whole(a), whole(b), i > 0);
    }
    const int step = i % 4 == 3 ? HALF_BYTES / 16 - 6 : 2;
    a += step, b += step;
    asm volatile("" : "+r"(a), "+r"(b));
  }
  product_commit();
}

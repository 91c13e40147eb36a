// Ring units of gate and up weights that four warps keep in registers. From one layer's down projection to the
// next layer's gate and up, blocks mostly exchange results, and more weights could be loaded than the ring has
// room for: each unit that these warps take out of the ring makes room for another one.
#pragma once

#include "fused/decoder_layers/product.cuh"

#if HELD > 0
static_assert(!MXFP4, "units are held as the tensor cores take them: FP8");
static_assert(HELD <= GateUpSize::GROUPS / NUM_BLOCKS * GateUpSize::UNITS, "every block has as many");
// A barrier's parity only tells whether a pass over the ring is even or odd. So a thread that waits for a slot
// to be full has to know that it was full in the previous pass, as all slots filled before the end of QKV were.
static_assert(OSize::MOST * OSize::UNITS + HELD <= STAGES, "a turn before is not behind QKV");

// A unit of the ring in the registers that `HeldProduct` reads.
struct HeldUnit {
  u32 pieces[4 * CHUNKS][4];

  DEVICE void take(const Shared& shared, u32 number) {
    const int lane = lane_id(), row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const u32 slot = number % STAGES, parity = number / STAGES & 1;
    const u32 from = shared.ring + slot * UNIT_BYTES + row * 128;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      barrier_wait(shared.full + 8 * (CHUNKS * slot + c), parity);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        u32(&x)[4] = pieces[4 * c + k];
        const u32 at = from + c * BLOCK_BYTES + ((2 * k + lane / 16) ^ row % 8) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
      }
    }
    // The slot is next written by another proxy (the copy engine).
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty + 8 * slot);
  }
  // The same result, bit for bit, as `start_chunk` for all chunks.
  template <class S>
  DEVICE void start(u32 tokens, float (&part)[S::OPERAND_ROWS / 2]) const {
#pragma unroll
    for (int k = 0; k < 4 * CHUNKS; ++k) {
      const u64 b = operand(tokens + k / 4 * S::OPERAND_ROWS * 128) + 2 * (k % 4);
      HeldProduct<S::OPERAND_ROWS>::add(part, pieces[k], b, k > 0);
    }
  }
};

// Run by the four warps in all layers.
DEVICE void hold_all(const Shared& shared, int num_layers) {
  typedef GateUpSize S;
  const int ahead = Share<QkvSize>().count * QkvSize::UNITS + Share<OSize>().count * OSize::UNITS;
  const int units = ahead + Share<S>().count * S::UNITS + Share<DownSize>().count * DownSize::UNITS;
  u32 number = ahead;  // in the ring: the layer's first unit that is held
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l, number += units) {
    HeldUnit held[HELD];
    float part[HELD][S::OPERAND_ROWS / 2];
    holders_meet<QKV_IS_DONE>();
#pragma unroll
    for (int u = 0; u < HELD; ++u) held[u].take(shared, number + u);
    holders_meet<TOKENS_ARE_THERE>();
#pragma unroll
    for (int u = 0; u < HELD; ++u) keep_order(part[u]);
    product_fence();
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      held[u].start<S>(shared.tokens + u % S::UNITS * S::OPERAND_BYTES, part[u]);
    }
    product_commit();
    product_wait<0>();
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      keep_order(part[u]);
      store_sums<S>(shared.sums<S>() + u * SUM_BYTES + lane_id() / 4 * 4, part[u]);
    }
    holders_arrive<SUMS_ARE_THERE>();
  }
}
#endif

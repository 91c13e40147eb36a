// How the weights of layers.cu get to a block: one warp for each chunk of an interval copies the block's
// share of all products, one after another, through the ring. These warps wait for no other block. Only a
// limited number of chunks is requested at once: more would not arrive faster, and every other request would
// queue behind them. From a layer's down projection to the next layer's gate and up, blocks mostly exchange
// results: there the limit is lower, so that weights arrive more slowly and results sooner.
#pragma once

#include "backends/cuda/sm90/barriers.cuh"
#include "fused/decoder_layers/chain.cuh"

// For a chunk that mostly another warp copies. That warp may be two passes over the ring ahead, and then the
// parity of the chunk's barrier is the same as before it arrived; so a slot that was already consumed counts,
// too. This is unambiguous, because no unit of the next pass can be consumed while this warp's chunk of it
// is missing (scripts/profile/ring_model.py).
DEVICE void wait_for_chunk(const Shared& shared, int behind) {
  const u32 at = behind % (CHUNKS * STAGES), parity = behind / (CHUNKS * STAGES) & 1;
  while (!barrier_try(shared.full + 8 * at, parity)) {
    if (barrier_is_over(shared.empty + 8 * (at / CHUNKS), parity)) break;
  }
}

// Ahead of a copy to a slot that threads have read and written: the copy engine's accesses are of another proxy.
DEVICE void fence_slot() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// At most IN_FIRST chunks in flight for the block's first FIRST units, then IN_REST. tiles_until: behind the ring's last
// unit of tiles (copy_tiles.cuh).
template <class S, int FIRST, int IN_FIRST, int IN_REST>
DEVICE void copy_product(const Shared& shared, const u8* weight, int chunk, u32& number, u64 policy,
                         u32 tiles_until = 0) {
  const Share<S> share;
  constexpr int PIECE = S::GROUP_ROWS * ROW_BYTES;  // an interval's chunk
#pragma unroll 1
  for (int i = 0; i < share.count; ++i) {
    const int row = (share.first + i * NUM_BLOCKS) * S::GROUP_ROWS;
    const u8* tile = weight + (long long)(row / 64) * S::INTERVALS * UNIT_BYTES;
    const u8* from = tile + chunk * BLOCK_BYTES + row % 64 * ROW_BYTES;
#pragma unroll 1
    for (int unit = 0; unit < S::UNITS; ++unit, ++number) {
      const u32 slot = number % STAGES, turns = number / STAGES;
      if (turns > 0) barrier_wait(shared.empty + 8 * slot, (turns & 1) ^ 1);
      if (IS_LONG && number < tiles_until + STAGES) fence_slot();
      const int most = i * S::UNITS + unit < FIRST ? IN_FIRST : IN_REST;
      const int behind = CHUNKS * number + chunk - most;
      if (behind >= 0) wait_for_chunk(shared, behind);
      const int intervals = min(S::UNIT_INTERVALS, S::INTERVALS - unit * S::UNIT_INTERVALS);
      const u32 full = shared.full + 8 * (CHUNKS * slot + chunk);
      const u32 to = shared.ring + slot * UNIT_BYTES + chunk * BLOCK_BYTES;
      barrier_expect(full, intervals * PIECE);
#pragma unroll
      for (int k = 0; k < S::UNIT_INTERVALS; ++k) {
        if (k < intervals) copy_block(to + k * PIECE, from + k * UNIT_BYTES, PIECE, full, policy);
      }
      from += S::UNIT_INTERVALS * UNIT_BYTES;
    }
  }
}

// Called by one thread of each warp.
DEVICE void copy_all(const Shared& shared, const Layer* layers, int num_layers, int chunk) {
  const u64 once = evict_first_policy();
  const auto load = [&](int layer, const u8* (&weights)[4]) {
    const Layer* its = layers + min(layer, num_layers - 1);
    weights[0] = its->qkv.weight, weights[1] = its->o.weight;
    weights[2] = its->gate_up.weight, weights[3] = its->down.weight;
  };
  const u8* weights[4];
  load(0, weights);
  u32 number = 0;
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l) {
    const u8* next[4];
    load(l + 1, next);  // a layer ahead, so that nothing waits for an address
    copy_product<QkvSize, 0, 0, IN_FLIGHT_SMALL>(shared, weights[0], chunk, number, once);
    copy_product<OSize, 0, 0, IN_FLIGHT_SMALL>(shared, weights[1], chunk, number, once);
    copy_product<GateUpSize, STAGES, IN_FLIGHT_AHEAD, IN_FLIGHT>(shared, weights[2], chunk, number,
                                                                 once);
    copy_product<DownSize, 0, 0, IN_FLIGHT>(shared, weights[3], chunk, number, once);
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = next[i];
  }
}

// The two warps that load the tiles of the kernel for many tokens: weight blocks and token tiles.
#pragma once

#include "ops/packed_linear/leaves.cuh"
#include "ops/packed_linear/prefill_store.cuh"
#include "ops/packed_linear/prefill_walk.cuh"

constexpr int BLOCK_BYTES = 8192;  // a packed block: 64 rows x 128 bytes
constexpr bool IS_FP8 = INPUT_TYPE::bytes == 1;
constexpr int CHUNK = 128 / INPUT_TYPE::bytes;  // elements
constexpr int LAST = WG_TILES - 1;  // row tile of a warpgroup
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int A_BYTES = WARPGROUPS * BLOCK_BYTES;
constexpr int B_BYTES = TILE_TOKENS * 128;
// With one row tile weights and tokens of a chunk are used together, and so have one ring and its barriers.
constexpr bool ONE_RING = WG_TILES == 1;
static_assert(!ONE_RING || A_STAGES == B_STAGES, "slots of one ring");

struct Shared {
  u32 a, b, staging, values, a_full, a_empty, b_full, b_empty;
  DEVICE explicit Shared(u32 base) {
    a = base;
    b = a + A_STAGES * A_BYTES;
    staging = b + B_STAGES * B_BYTES;
    values = staging + WARPGROUPS * STAGING_BYTES;
    a_full = values + WARPGROUPS * TokenValues<TILE_TOKENS>::BYTES;
    a_empty = a_full + 8 * A_STAGES;
    b_full = ONE_RING ? a_full : a_empty + 8 * A_STAGES;
    b_empty = ONE_RING ? a_empty : b_full + 8 * B_STAGES;
  }
};

DEVICE void load_weights(const Shared& shared, const Work& work, const u8* weight) {
  const u64 policy = evict_first_policy();
  if (EXPANDED) wait_for_dependencies();
  Ring<A_STAGES> ring;
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    int row_block, token;
    work.at(walk.unit, row_block, token);
    const int block_tile = row_block * WARPGROUPS * WG_TILES;
#pragma unroll 1
    for (int start = walk.first; start < walk.last; start += INTERVAL) {
      const int end = min(start + INTERVAL, walk.last);
#pragma unroll 1
      for (int tile = 0; tile < WG_TILES; ++tile) {
#pragma unroll 1
        for (int chunk = start; chunk < end; ++chunk, ring.advance()) {
          const u32 full = shared.a_full + 8 * ring.slot;
          barrier_wait(shared.a_empty + 8 * ring.slot, ring.parity ^ 1);
          barrier_expect(full, A_BYTES);
#pragma unroll
          for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
            int index = block_tile + warpgroup * WG_TILES + tile;
            index = min(index, work.row_tiles - 1);  // rows beyond the end are computed and dropped
            const u8* from = weight + (u64(index) * work.chunks + chunk) * BLOCK_BYTES;
            const u32 to = shared.a + ring.slot * A_BYTES + warpgroup * BLOCK_BYTES;
            copy_block(to, from, BLOCK_BYTES, full, policy);
          }
        }
      }
    }
  }
}

DEVICE void load_tokens(const Shared& shared, const Work& work, const TensorMap* x) {
  const Leaf leaf(work.row_tiles, work.chunks);
  Ring<B_STAGES> ring;
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    int row_block, token;
    work.at(walk.unit, row_block, token);
    const int first = leaf.first_chunk(row_block * WARPGROUPS * WG_TILES);
#pragma unroll 1
    for (int chunk = walk.first; chunk < walk.last; ++chunk, ring.advance()) {
      const u32 full = shared.b_full + 8 * ring.slot;
      barrier_wait(shared.b_empty + 8 * ring.slot, ring.parity ^ 1);
      barrier_expect(full, B_BYTES);
      copy_box(shared.b + ring.slot * B_BYTES, x, (first + chunk) * CHUNK, token, full);
    }
  }
}

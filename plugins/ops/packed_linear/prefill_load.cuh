// The tiles of the kernel for many tokens, and the two warps that load them: weight blocks and token
// tiles.
#pragma once

#include "ops/packed_linear/leaves.cuh"
#include "ops/packed_linear/prefill_store.cuh"

constexpr int BLOCK_BYTES = 8192;  // a packed block: 64 rows x 128 bytes
constexpr bool IS_FP8 = INPUT_TYPE::bytes == 1;
constexpr int CHUNK = 128 / INPUT_TYPE::bytes;  // elements
constexpr int INTERVAL = IS_FP8 ? 4 : 1;        // chunks between which row tiles alternate
constexpr int WARPGROUPS = 2;
constexpr int LAST = WG_TILES - 1;  // row tile of a warpgroup
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int A_BYTES = WARPGROUPS * BLOCK_BYTES;
constexpr int B_BYTES = TILE_TOKENS * 128;
constexpr int GROUP_TOKENS = 2048;  // token tiles that use the weights at the same time

struct Shared {
  u32 a, b, staging, values, a_full, a_empty, b_full, b_empty;
  DEVICE explicit Shared(u32 base) {
    a = base;
    b = a + A_STAGES * A_BYTES;
    staging = b + B_STAGES * B_BYTES;
    values = staging + WARPGROUPS * STAGING_BYTES;
    a_full = values + WARPGROUPS * TokenValues<TILE_TOKENS>::BYTES;
    a_empty = a_full + 8 * A_STAGES;
    b_full = a_empty + 8 * A_STAGES;
    b_empty = b_full + 8 * B_STAGES;
  }
};

// The tiles of a step. A unit is the tile that a block computes at a time.
struct Work {
  int row_tiles, chunks, tokens;

  DEVICE int row_blocks() const {
    return (row_tiles + WARPGROUPS * WG_TILES - 1) / (WARPGROUPS * WG_TILES);
  }
  DEVICE int token_tiles() const { return (tokens + TILE_TOKENS - 1) / TILE_TOKENS; }
  DEVICE int units() const { return row_blocks() * token_tiles(); }
  DEVICE int first() const { return blockIdx.x; }
  DEVICE int stride() const { return gridDim.x; }
  // Units that run at the same time share weights; a group of token tiles iterates over all weights.
  DEVICE void at(int unit, int& row_block, int& token) const {
    constexpr int GROUP = GROUP_TOKENS / TILE_TOKENS;
    const int group = unit / (GROUP * row_blocks()), start = group * GROUP;
    const int width = min(GROUP, token_tiles() - start), rest = unit - start * row_blocks();
    row_block = rest / width;
    token = (start + rest % width) * TILE_TOKENS;
  }
  DEVICE int token(int unit) const {
    int row_block, first_token;
    at(unit, row_block, first_token);
    return first_token;
  }
};

DEVICE void load_weights(const Shared& shared, const Work& work, const u8* weight) {
  const u64 policy = evict_first_policy();
  if (EXPANDED) wait_for_dependencies();
  Ring<A_STAGES> ring;
#pragma unroll 1
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    int row_block, token;
    work.at(unit, row_block, token);
    const int block_tile = row_block * WARPGROUPS * WG_TILES;
#pragma unroll 1
    for (int start = 0; start < work.chunks; start += INTERVAL) {
      const int end = min(start + INTERVAL, work.chunks);
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
  for (int unit = work.first(); unit < work.units(); unit += work.stride()) {
    int row_block, token;
    work.at(unit, row_block, token);
    const int first = leaf.first_chunk(row_block * WARPGROUPS * WG_TILES);
#pragma unroll 1
    for (int chunk = 0; chunk < work.chunks; ++chunk, ring.advance()) {
      const u32 full = shared.b_full + 8 * ring.slot;
      barrier_wait(shared.b_empty + 8 * ring.slot, ring.parity ^ 1);
      barrier_expect(full, B_BYTES);
      copy_box(shared.b + ring.slot * B_BYTES, x, (first + chunk) * CHUNK, token, full);
    }
  }
}

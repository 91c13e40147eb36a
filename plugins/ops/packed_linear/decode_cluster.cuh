// Sums of the kernel for few tokens when a cluster shares them: each block multiplies a range of intervals
// and sends every interval's part to the block that owns its rows.
#pragma once

#include "ops/packed_linear/decode_products.cuh"

DEVICE u32 part_offset(int interval, int tile, int quarter, int octet) {
  return (((interval * ROW_TILES + tile) * OWNED + quarter) * OCTETS + octet) * PART_BYTES +
         threadIdx.x % 32 * 16;
}

template <int ACTIVE>
DEVICE void multiply_share(const Shared& shared, Walk& walk, const Epilogue& e,
                           const Tokens& tokens, int chunks) {
  const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER;
  const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
  constexpr int SLICES = ACTIVE * OWNED * OCTETS;
  constexpr int ROUNDS = (SLICES + 3) / 4;
  const bool holds = warp < SLICES;  // one slice is prepared ahead, the others in order of arrival
  Slice held;
  if (holds) {
    held.load_rows(e, walk.tile + warp / (OWNED * OCTETS),
                   rank * OWNED + warp / OCTETS % OWNED, warp % OCTETS);
  }
  tokens.wait(shared, walk, [&] {
    if (holds) held.load_tokens(e);
  });

  const u32 owner = warp / OWNED;
  const u32 parts = remote_address(shared.parts, owner);
  const u32 parts_full = remote_address(shared.parts_full, owner);
  cluster_wait();  // every block of the cluster has initialised its barriers
  const auto send = [&](float (&part)[ACTIVE][TOKENS / 2], int chunk) {
#pragma unroll
    for (int i = 0; i < ACTIVE * OCTETS; ++i) {
      const float* p = &part[i / OCTETS][4 * (i % OCTETS)];
      store_remote(parts + part_offset(chunk / INTERVAL, i / OCTETS, warp % OWNED, i % OCTETS),
                   parts_full, p[0], p[1], p[2], p[3]);
    }
  };
  multiply_intervals<ACTIVE>(shared, walk, send, [&] {
    if (holds) held.complete_tokens(e);
  });
  barrier_wait_cluster(shared.parts_full, 0);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int i = 4 * round + warp;
    if (i >= SLICES) break;
    const int tile = i / (OWNED * OCTETS), quarter = i / OCTETS % OWNED, octet = i % OCTETS;
    float sum[4];
#pragma unroll 4
    for (int interval = 0; interval < intervals; ++interval) {
      float p[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(p[0]), "=f"(p[1]), "=f"(p[2]), "=f"(p[3])
                   : "r"(shared.parts + part_offset(interval, tile, quarter, octet)));
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = interval == 0 ? p[j] : __fadd_rn(sum[j], p[j]);
    }
    if (round > 0) {
      held.load_rows(e, walk.tile + tile, rank * OWNED + quarter, octet);
      held.load_tokens(e);
      held.complete_tokens(e);
    }
    held.store(e, sum);
  }
}

template <int ACTIVE>
DEVICE void multiply_active_share(const Shared& shared, Walk& walk, const Epilogue& e,
                                  const Tokens& tokens, int chunks) {
  if (walk.active == ACTIVE) {
    multiply_share<ACTIVE>(shared, walk, e, tokens, chunks);
  } else if constexpr (ACTIVE > 1) {
    multiply_active_share<ACTIVE - 1>(shared, walk, e, tokens, chunks);
  }
}

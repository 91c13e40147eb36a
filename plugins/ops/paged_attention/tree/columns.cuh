// The warps of tree.cu and long.cu that attend to the keys of each token's path (paths.cuh), 8 rows each: the names they
// share with warpgroups, and their queries.
#pragma once

#include "ops/paged_attention/chunk/rows.cuh"

#define COLUMNS 8
#define QUERY_BYTES (SIZE * 16)
namespace columns {  // batch/warp.cuh has names of shared/operands.cuh
#include "ops/paged_attention/tree/paths.cuh"
}

// Queries of a warp's 8 rows in the layout of its products; zeros for missing rows.
DEVICE void stage_columns(u32 target, const MODEL_TYPE::Storage* q, const Item& item, int block) {
  const int row = 8 * block + lane_id() / 4;
  const long long its = (long long)(item.token + row / GROUP) * HEADS + item.head;
  const MODEL_TYPE::Storage* from = q + its * (GROUP * SIZE) + row % GROUP * SIZE;
  u32 x[STEPS][2];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const u32* at = (const u32*)(from + columns::query_dimension(i, pair));
      x[i][pair] = row < item.rows ? __ldcg(at) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(target + i * 256 + lane_id() * 8),
                 "r"(to_inner(x[i][0])), "r"(to_inner(x[i][1]))
                 : "memory");
  }
}

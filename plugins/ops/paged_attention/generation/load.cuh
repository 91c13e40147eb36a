// What generation.cu reads besides keys and values: the step's parameters and the queries.
#pragma once

#include "ops/paged_attention/generation/units.cuh"

// ---- the parameters of a step ----

DEVICE Numbers all_numbers(int x) {
  return {__shfl_sync(~0u, x, 0), __shfl_sync(~0u, x, 1), __shfl_sync(~0u, x, 2)};
}

// Pages of one tile, one per lane; page 0 if there is none (it can be read like any other).
DEVICE int read_page(const int* table, int tile, int end, int num_pages) {
  const int lane = threadIdx.x % 32, entry = tile / TILES_PER_PAGE * TILE_PAGES + lane;
  int page = 0;
  if (lane < TILE_PAGES && u32(entry) < u32(end)) page = load_int(table + entry);
  return u32(page) < u32(num_pages) ? page : 0;
}

// ---- queries ----

// Queries, 16 bytes each: rows `threadIdx.x / QUERY_PIECES` + i QUERY_STEP.
constexpr int QUERY_PIECES = SIZE / 8, QUERY_STEP = THREADS / QUERY_PIECES;
constexpr int QUERY_LOADS = ROWS / QUERY_STEP;

DEVICE void load_queries(uint4 (&x)[QUERY_LOADS], const MODEL_TYPE::Storage* q, int token, int head,
                         int num_rows, int num_tokens) {
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; ++i) {
    const int row = threadIdx.x / QUERY_PIECES + i * QUERY_STEP, its = token + row / GROUP;
    const long long at = ((long long)its * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE +
                         threadIdx.x % QUERY_PIECES * 8;
    if (row < num_rows && u32(its) < u32(num_tokens)) {
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                   : "l"(q + at));
    }
  }
}

DEVICE void stage_queries(u32 target, const uint4 (&x)[QUERY_LOADS], int num_rows) {
  const int piece = threadIdx.x % QUERY_PIECES;
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; ++i) {
    const int row = threadIdx.x / QUERY_PIECES + i * QUERY_STEP;
    const u32 to = target + piece / 8 * HALF_BYTES + row * 128;
    if (row < num_rows) {
      store_shared(to + ((piece % 8 ^ (row & 7)) << 4), to_inner(x[i].x), to_inner(x[i].y),
                   to_inner(x[i].z), to_inner(x[i].w));
    }
  }
}

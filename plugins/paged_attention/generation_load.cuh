// What generation.cu reads: the step's numbers, keys and values, queries; and how these become
// operands of the tensor cores.
#pragma once

#include "paged_attention/generation_units.cuh"

// ---- the numbers of a step ----

DEVICE Numbers all_numbers(int x) {
  return {__shfl_sync(~0u, x, 0), __shfl_sync(~0u, x, 1), __shfl_sync(~0u, x, 2)};
}

// Pages of one tile, a lane each; page 0 where there is none, which may be read like any other.
DEVICE int read_page(const int* table, int tile, int end, int num_pages) {
  const int lane = threadIdx.x % 32, entry = tile / TILES_PER_PAGE * TILE_PAGES + lane;
  int page = 0;
  if (lane < TILE_PAGES && u32(entry) < u32(end)) page = load_int(table + entry);
  return u32(page) < u32(num_pages) ? page : 0;
}

// ---- keys and values: global memory, registers, operands ----

DEVICE void load_piece(uint4& x, const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
}

// A thread loads keys `key` + i KEY_STEP of a tile. Where a page holds several of them, they share
// its number.
constexpr int NUMBERS = SPAN < KEY_STEP ? LOADS : TILE_PAGES;

struct Loader {
  const KV_TYPE::Storage* cache;
  const int* tables;
  int offset;  // in a page, of the thread's piece of the first key that it loads
  int table;   // the request's first entry
  int pages[NUMBERS];

  static DEVICE int nth_page(int i) {  // of a tile
    return threadIdx.x / PIECES / SPAN + (SPAN < KEY_STEP ? i * (KEY_STEP / SPAN) : i);
  }
  DEVICE void take_pages(const int* shared) {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) pages[i] = shared[nth_page(i)];
  }
  DEVICE void load_pages(int tile, int end) {  // `end`: table entries
    const int first = tile / TILES_PER_PAGE * TILE_PAGES;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      const int entry = first + nth_page(i);
      pages[i] = 0;
      if (entry < end) pages[i] = load_int(tables + table + entry);
    }
  }
  // All keys of a tile, also those behind the last that is written.
  DEVICE void load(int tile, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const KV_TYPE::Storage* from = at(tile, i);
      load_piece(k[i], from);
      load_piece(v[i], from + PAGE);
    }
  }
  // Bring a tile as far as L2. What others may still write does no harm there.
  DEVICE void prefetch(int tile) const {
    constexpr int SHARERS = PIECES < 8 ? PIECES : 8;  // threads whose pieces are of one line
    if (threadIdx.x % SHARERS != 0) return;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const KV_TYPE::Storage* from = at(tile, i);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + PAGE));
    }
  }
  // The tile `next` is at, and the pages of the tile after it.
  DEVICE void load_next(Units next, int end, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) {
    load(next.tile, k, v);
    next.next();
    if (!next.done()) load_pages(next.tile, end);
  }

 private:
  DEVICE const KV_TYPE::Storage* at(int tile, int i) const {
    const int number = SPAN < KEY_STEP ? i : i * KEY_STEP / SPAN;
    int inside = offset;
    if (TILES_PER_PAGE > 1) inside += tile % TILES_PER_PAGE * (KEYS * SIZE);
    if (SPAN >= KEY_STEP) inside += i * KEY_STEP % SPAN * SIZE;
    return cache + pages[number] * (2 * PAGE) + inside;
  }
};

// Zeros for the keys of a tile from `left` on: no weight makes a number of a NaN.
DEVICE void clear_from(uint4 (&x)[LOADS], int left) {
  const int key = threadIdx.x / PIECES;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    if (key + i * KEY_STEP >= left) x[i] = {0, 0, 0, 0};
  }
}

DEVICE u32 widen_pair(u32 x) {
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(u16(x)));
  return y;
}

DEVICE void store_shared(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Pieces of a tile as an operand: 128 bytes a key, 16-byte parts swizzled.
DEVICE void stage(u32 target, const uint4 (&x)[LOADS]) {
  const int piece = threadIdx.x % PIECES;
  int key = threadIdx.x / PIECES;
  hold_back(key);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int row = key + i * KEY_STEP;
    if (IS_FP8) {
      const int half = piece / 4, part = piece % 4 * 2;
      const u32 to = target + half * HALF_BYTES + row * 128;
      const u32 words[8] = {widen_pair(x[i].x), widen_pair(x[i].x >> 16), widen_pair(x[i].y),
                            widen_pair(x[i].y >> 16), widen_pair(x[i].z), widen_pair(x[i].z >> 16),
                            widen_pair(x[i].w), widen_pair(x[i].w >> 16)};
      const bool swap = half;  // the halves' stores fall on different banks
      const u32* w = words;
      const u32 first = to + (((part + swap) ^ (row & 7)) << 4);
      const u32 second = to + (((part + !swap) ^ (row & 7)) << 4);
      store_shared(first, swap ? w[4] : w[0], swap ? w[5] : w[1], swap ? w[6] : w[2],
                   swap ? w[7] : w[3]);
      store_shared(second, swap ? w[0] : w[4], swap ? w[1] : w[5], swap ? w[2] : w[6],
                   swap ? w[3] : w[7]);
    } else {
      const u32 to = target + piece / 8 * HALF_BYTES + row * 128;
      store_shared(to + ((piece % 8 ^ (row & 7)) << 4), x[i].x, x[i].y, x[i].z, x[i].w);
    }
  }
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

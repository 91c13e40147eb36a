// What the kernel for many tokens leaves of logits where their best ids alone are wanted: for each token the largest key
// of all rows (ids), in memory that has zeros before. The logits themselves are not stored.
//
// A key is that of `best_key` (sampling/triton_values.py): it compares as the logits do, where -0 equals 0 and NaN is
// above all; of equal logits the lowest id has the largest. So the order of comparing does not matter.
#pragma once

#include "ops/packed_linear/prefill_staging.cuh"

constexpr u32 NAN_ORDER = 0xffffffff, LAST_ID = 0x7fffffff;

DEVICE u64 key_of(float x, int id) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  const u32 order = x != x ? NAN_ORDER : bits >> 31 ? ~bits : bits | 0x80000000u;
  return u64(order) << 31 | (LAST_ID - u32(id));
}

DEVICE u64 larger(u64 a, u64 b) { return a < b ? b : a; }

// Hands half of the keys to the lane LANES away, which hands over its other half: what both have is compared.
template <int LANES, int COUNT>
DEVICE void halve(u64 (&to)[COUNT / 2], const u64 (&keys)[COUNT]) {
  const bool keeps_last = threadIdx.x & LANES;
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    const u64 kept = keeps_last ? keys[COUNT / 2 + i] : keys[i];
    const u64 given = keeps_last ? keys[i] : keys[COUNT / 2 + i];
    to[i] = larger(kept, __shfl_xor_sync(~0u, given, LANES));
  }
}

// Whether one of the warp's logits may be the best of its token.
template <int TOKENS>
DEVICE bool may_be_best(const Ahead<TOKENS>& ahead, const float (&sum)[TOKENS / 2], u32 values) {
  bool is_above = false;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
    float low[2], high[2];
    finish_sums<TOKENS>(ahead.rows, values, 8 * i + threadIdx.x % 4 * 2, &sum[4 * i], low, high);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const float least = ahead.bounds.least[i][next];
      is_above |= !(low[next] < least) | !(high[next] < least);  // NaN, too
    }
  }
  return __any_sync(~0u, is_above);
}

// Of 64 rows; a warp has 16. Of every 32 tokens a lane ends with one: the largest of eight lanes' rows.
template <int TOKENS>
DEVICE void store_tile(const Epilogue& e, const Divisor&, Ahead<TOKENS>& ahead,
                       const float (&sum)[TOKENS / 2], int row_tile, int, int token0, u32, u32 values, int warpgroup) {
  if (PER_TOKEN) warpgroup_sync(warpgroup);  // scales of tokens are there
  static_assert(!PER_TOKEN || !Bounds<TOKENS>::ARE_KNOWN, "all warps meet below");
  if constexpr (Bounds<TOKENS>::ARE_KNOWN) {
    if (!may_be_best<TOKENS>(ahead, sum, values)) return;
  }
  const int lane = lane_id(), row = row_tile * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int token = token0 + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
  u64 there[(TOKENS + 31) / 32];  // most keys are below one that is there already: it is only larger later
#pragma unroll
  for (int i = 0; i < (TOKENS + 31) / 32; ++i) {
    const int its = token + 32 * i;
    const bool is_of_tile = its - token0 < TOKENS && its < e.tokens;
    there[i] = is_of_tile ? *(const volatile u64*)(e.keys + its) : ~0ull;
  }
#pragma unroll
  for (int some = 0; some < TOKENS; some += 32) {
    u64 keys[8], four[4], two[2], one[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = some + 8 * i;
      if (at >= TOKENS) {
        keys[2 * i] = keys[2 * i + 1] = 0;
        continue;
      }
      float low[2], high[2];
      finish_sums<TOKENS>(ahead.rows, values, at + lane % 4 * 2, &sum[at / 2], low, high);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const float x = low[next], y = high[next];
        const bool is_first = x >= y || x != x || row + 8 >= e.width;  // what is behind the width is padding
        keys[2 * i + next] = row < e.width ? key_of(is_first ? x : y, is_first ? row : row + 8) : 0;
      }
    }
    halve<16>(four, keys);
    halve<8>(two, four);
    halve<4>(one, two);
    if (one[0] > there[some / 32]) atomicMax(e.keys + token + some, one[0]);
  }
  if (PER_TOKEN) warpgroup_sync(warpgroup);  // all warps have read the scales: those of the next tile take their place
}

// How a warpgroup of the kernel for many tokens stores its sums: the arithmetic of epilogue.cuh, then a
// transposition through shared memory, so that stores to [tokens, rows] are contiguous.
//
// A warp's sums of one 64-row tile are 16 rows; a thread has rows lane / 4 and lane / 4 + 8 of
// them, and of every eight tokens the two at 2 (lane % 4).
#pragma once

#include "ops/packed_linear/prefill_staging.cuh"
#if EPILOGUE == 2
#include "ops/packed_linear/prefill_rotate.cuh"
#endif

#if EPILOGUE == 1

// 64 packed rows produce 32 columns.
template <int TOKENS>
DEVICE void store_tile(const Epilogue& e, const float (&sum)[TOKENS / 2], int row_tile,
                       int row_tiles, int token0, u32 staging, u32 values, int warpgroup) {
  constexpr int UNITS = 4;  // of a token
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const Divisor divisor(e.scale);
  const RowConstants rows = load_rows(e, min(row_tile, row_tiles - 1) * 4 + warp);
#pragma unroll
  for (int pass = 0; pass < TOKENS / STAGED_TOKENS; ++pass) {
    const int token1 = token0 + pass * STAGED_TOKENS;
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32 fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int octet = step * 4 + i;
        float y[2], x_scale[2];
        const int at = pass * STAGED_TOKENS + octet * 8 + lane % 4 * 2;
        TokenValues<TOKENS>::x_scales(values, at, x_scale);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const float* sums = &sum[(pass * 8 + octet) * 4 + next];
          y[next] = swiglu(e, rows, x_scale[next], sums[0], sums[2]);
        }
        fragment[i] = MODEL_TYPE::pack_pair(y[0], y[1]);
      }
      store_transposed(staged(staging, step * 32 + lane, warp), fragment);
    }
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int i = 0; i < STAGED_TOKENS * UNITS / 128; ++i) {
      const int token = (i * 128 + thread) / UNITS, unit = thread % UNITS;
      const int column = row_tile * 32 + unit * 8;
      if (token1 + token < e.tokens && column < e.width) {
        const uint4 loaded = load_unit(staged(staging, token, unit));
        OUT_TYPE::Storage* to = e.out + (long long)(token1 + token) * e.width + column;
        if constexpr (is_byte<OUT_TYPE>) {
          *reinterpret_cast<uint2*>(to) = quantize_unit<OUT_TYPE>(loaded, divisor);
        } else {
          *reinterpret_cast<uint4*>(to) = loaded;
        }
      }
    }
  }
}

#else

// The sums of two adjacent tokens and two rows (r, r + 8), scaled, before the last rounding.
template <int TOKENS>
DEVICE void finish_sums(const Epilogue& e, const RowConstants& rows, u32 values, int at,
                        const float* sums, float (&low)[2], float (&high)[2]) {
  float x_scale[2];
  TokenValues<TOKENS>::x_scales(values, at, x_scale);
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    low[next] = finish(e, rows, 0, x_scale[next], sums[next]);
    high[next] = finish(e, rows, 1, x_scale[next], sums[2 + next]);
  }
}

DEVICE void store_floats(const Epilogue& e, int row, int token, const float (&low)[2],
                         const float (&high)[2]) {
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    OUT_TYPE::Storage* to = e.out + (long long)(token + next) * e.width + row;
    if (token + next < e.tokens && row < e.width) to[0] = OUT_TYPE::pack(low[next]);
    if (token + next < e.tokens && row + 8 < e.width) to[8] = OUT_TYPE::pack(high[next]);
  }
}

#if EPILOGUE != 2

DEVICE void store_unit(const Epilogue& e, u32 staging, int line, int first_unit, int turn,
                       int token) {
  const int column = (first_unit + turn) * 8;
  if (column >= e.width) return;
  const uint4 values = load_unit(staged(staging, line, turn));
  OUT_TYPE::Storage* to = e.out + (long long)token * e.width + column;
  if (e.width % 8 == 0) {  // else rows of `out` are not aligned
    *reinterpret_cast<uint4*>(to) = values;
    return;
  }
  const u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < e.width) to[i] = u16(pairs[i / 2] >> (16 * (i % 2)));
  }
}

#endif

template <int TOKENS>
DEVICE void store_tile(const Epilogue& e, const float (&sum)[TOKENS / 2], int row_tile,
                       int row_tiles, int token0, u32 staging, u32 values, int warpgroup) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int group = min(row_tile, row_tiles - 1) * 4 + warp;
  const RowConstants rows = load_rows(e, group);
#pragma unroll
  for (int pass = 0; pass < TOKENS / STAGED_TOKENS; ++pass) {
    const int token1 = token0 + pass * STAGED_TOKENS;
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 fragment[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int octet = step * 2 + i, at = octet * 8 + lane % 4 * 2;
        float low[2], high[2];
        finish_sums<TOKENS>(e, rows, values, pass * STAGED_TOKENS + at,
                            &sum[(pass * 8 + octet) * 4], low, high);
        if constexpr (OUT_TYPE::bytes == 4) {  // eight rows of float32 already are a whole sector
          store_floats(e, row_tile * 64 + warp * 16 + lane / 4, token1 + at, low, high);
        } else {
          fragment[2 * i] = MODEL_TYPE::pack_pair(low[0], low[1]);
          fragment[2 * i + 1] = MODEL_TYPE::pack_pair(high[0], high[1]);
        }
      }
      if constexpr (OUT_TYPE::bytes != 4) {
        const int token = (step * 2 + lane / 16) * 8 + lane % 8;
        store_transposed(staged(staging, token, warp * 2 + lane / 8 % 2), fragment);
      }
    }
#if EPILOGUE == 2
    Stored<TOKENS> stored;
    stored.load(e, row_tile, token1, values, pass * STAGED_TOKENS);
    warpgroup_sync(warpgroup);
    if (row_tile < row_tiles) stored.store(e, row_tile, token1, staging);
#else
    warpgroup_sync(warpgroup);
    if constexpr (OUT_TYPE::bytes != 4) {
#pragma unroll
      for (int i = 0; i < STAGED_TOKENS * 8 / 128; ++i) {
        const int line = i * 16 + thread / 8, token = token1 + line;
        if (token < e.tokens && row_tile < row_tiles) {
          store_unit(e, staging, line, row_tile * 8, thread % 8, token);
        }
      }
    }
#endif
  }
}

#endif

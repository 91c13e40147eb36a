// How a warpgroup of the kernel for many tokens stores its sums: the arithmetic of epilogue.cuh, then a
// transposition through shared memory, so that stores to [tokens, rows] are contiguous.
//
// A warp's sums of one 64-row tile are 16 rows; a thread has rows lane / 4 and lane / 4 + 8 of
// them, and of every eight tokens the two at 2 (lane % 4).
#pragma once

#include "backends/cuda/sm90/pairs.cuh"
#include "ops/packed_linear/prefill_staging.cuh"
#if EPILOGUE == 2
#include "ops/packed_linear/prefill_rotate.cuh"
#elif EPILOGUE == 4
#include "ops/packed_linear/prefill_bounds.cuh"
#endif

// What the end of a row tile needs besides its sums, loaded before its last products.
template <int TOKENS>
struct Ahead {
  RowConstants rows;
#if EPILOGUE == 2
  Stored<TOKENS> stored;
#elif EPILOGUE == 4
  Bounds<TOKENS> bounds;
#endif

  // What may be loaded before all products of a tile.
  DEVICE void load_early(const Epilogue& e, int token0) {
#if EPILOGUE == 4
    bounds.load(e, token0);
#endif
  }
  DEVICE void load(const Epilogue& e, int row_tile, int row_tiles, int token0, u32 values,
                   int warpgroup) {
    rows = load_rows(e, min(row_tile, row_tiles - 1) * 4 + threadIdx.x % 128 / 32);
    if (!PER_TOKEN && e.x_scale) {
      const float x_scale = __ldg(e.x_scale);
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.scale[half] = __fmul_rn(x_scale, rows.scale[half]);
    }
#if EPILOGUE == 2
    warpgroup_sync(warpgroup);  // positions are there
    stored.load(e, row_tile, token0, values, 0);
#endif
  }
};

// What sums of a row are multiplied by and what is added, with the scale of a token.
DEVICE float finish_sum(const RowConstants& rows, int half, float x_scale, float sum) {
  const float scale = PER_TOKEN ? __fmul_rn(x_scale, rows.scale[half]) : rows.scale[half];
  const float y = __fmul_rn(sum, scale);
  return HAS_BIAS ? __fadd_rn(y, rows.bias[half]) : y;
}

#if EPILOGUE == 1

// `swiglu` of epilogue_values.cuh for two tokens, from sums {gate, gate, up, up}.
template <int TOKENS>
DEVICE u32 swiglu_pair(const RowConstants& rows, u32 values, int at, const float* sums) {
  float x_scale[2];
  if (PER_TOKEN) TokenValues<TOKENS>::x_scales(values, at, x_scale);
  float finished[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) finished[i] = finish_sum(rows, i / 2, x_scale[i % 2], sums[i]);
  const u32 gates = MODEL_TYPE::pack_pair(finished[0], finished[1]);
  const u32 ups = MODEL_TYPE::pack_pair(finished[2], finished[3]);
  typedef Pairs<MODEL_TYPE> Pair;
  const u32 activated = MODEL_TYPE::pack_pair(silu(Pair::low(gates)), silu(Pair::high(gates)));
  return Pair::multiply(activated, ups);
}

// 64 packed rows produce 32 columns.
template <int TOKENS>
DEVICE void store_tile(const Epilogue& e, const Divisor& divisor, const Ahead<TOKENS>& ahead,
                       const float (&sum)[TOKENS / 2], int row_tile, int row_tiles, int token0,
                       u32 staging, u32 values, int warpgroup) {
  constexpr int UNITS = 4;  // of a token
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int token1 = token0 + pass * STAGED_TOKENS;
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32 fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int octet = pass * 8 + step * 4 + i, at = octet * 8 + lane % 4 * 2;
        if (octet * 8 >= TOKENS) fragment[i] = 0;
        else fragment[i] = swiglu_pair<TOKENS>(ahead.rows, values, at, &sum[octet * 4]);
      }
      store_transposed(staged(staging, step * 32 + lane, warp), fragment);
    }
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int i = 0; i < STAGED_TOKENS * UNITS / 128; ++i) {
      const int token = (i * 128 + thread) / UNITS, unit = thread % UNITS;
      const int column = row_tile * 32 + unit * 8;
      const bool is_of_tile = TOKENS % STAGED_TOKENS == 0 || pass * STAGED_TOKENS + token < TOKENS;
      if (is_of_tile && token1 + token < e.tokens && column < e.width) {
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
DEVICE void finish_sums(const RowConstants& rows, u32 values, int at, const float* sums,
                        float (&low)[2], float (&high)[2]) {
  float x_scale[2];
  if (PER_TOKEN) TokenValues<TOKENS>::x_scales(values, at, x_scale);
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    low[next] = finish_sum(rows, 0, x_scale[next], sums[next]);
    high[next] = finish_sum(rows, 1, x_scale[next], sums[2 + next]);
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

#if EPILOGUE == 4

#include "ops/packed_linear/prefill_best.cuh"

#else
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
DEVICE void store_tile(const Epilogue& e, const Divisor&, Ahead<TOKENS>& ahead,
                       const float (&sum)[TOKENS / 2], int row_tile, int row_tiles, int token0,
                       u32 staging, u32 values, int warpgroup) {
  static_assert(TOKENS % STAGED_TOKENS == 0, "tokens are stored 64 at a time");
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int token1 = token0 + pass * STAGED_TOKENS;
#if EPILOGUE == 2
    if (pass > 0) ahead.stored.load(e, row_tile, token1, values, pass * STAGED_TOKENS);
#endif
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 fragment[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int octet = step * 2 + i, at = octet * 8 + lane % 4 * 2;
        float low[2], high[2];
        finish_sums<TOKENS>(ahead.rows, values, pass * STAGED_TOKENS + at,
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
    warpgroup_sync(warpgroup);
    if (row_tile < row_tiles) ahead.stored.store(e, row_tile, token1, staging);
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
#endif

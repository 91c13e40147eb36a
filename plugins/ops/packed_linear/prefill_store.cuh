// How a warpgroup of the kernel for many tokens stores its sums: the arithmetic of epilogue.cuh, then a
// transposition through shared memory, so that stores to [tokens, rows] are contiguous.
//
// A warp's sums of one 64-row tile are 16 rows; a thread has rows lane / 4 and lane / 4 + 8 of
// them, and of every eight tokens the two at 2 (lane % 4). The staging area of a warpgroup is [64
// tokens][8 units of 8 values of the model type]; a unit, 16 bytes, lies at unit XOR (token % 8).
#pragma once

#include "ops/packed_linear/quantize.cuh"

constexpr int STAGED_TOKENS = 64;
constexpr int STAGING_BYTES = STAGED_TOKENS * 128;

DEVICE void warpgroup_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

DEVICE u32 staged(u32 staging, int token, int unit) {
  return staging + token * 128 + ((unit ^ (token % 8)) * 16);
}

// Stores four 8 x 8 fragments transposed; each lane passes the address of one row of one of them.
DEVICE void store_transposed(u32 address, const u32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

DEVICE uint4 load_unit(u32 address) {
  uint4 unit;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "r"(address)
               : "memory");
  return unit;
}

// The constants for a token's sums: loaded when a tile begins, stored in shared memory when it ends.
// A thread loads tokens thread, thread + 128.
template <int TOKENS>
struct TokenValues {
  static constexpr bool HAS_POSITIONS = EPILOGUE == 2;
  static constexpr int PER_THREAD = (TOKENS + 127) / 128;
  static constexpr int BYTES = TOKENS * 4 * (HAS_POSITIONS ? 2 : 1);
  float x_scale[PER_THREAD];
  int position[PER_THREAD];

  DEVICE void load(const Epilogue& e, int token0) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int at = threadIdx.x % 128 + 128 * i, token = token0 + at;
      x_scale[i] = at < TOKENS ? load_x_scale(e, token) : 1.0f;
#if EPILOGUE == 2
      position[i] = at < TOKENS && token < e.tokens ? e.positions[token] : 0;
#endif
    }
  }
  DEVICE void keep(u32 values) const {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const u32 at = threadIdx.x % 128 + 128 * i;
      if (at < TOKENS) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(values + at * 4), "f"(x_scale[i]) : "memory");
        if (HAS_POSITIONS) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(values + (TOKENS + at) * 4), "r"(position[i])
                       : "memory");
        }
      }
    }
  }
  // Of the token `at` of the tile and the next one.
  static DEVICE void x_scales(u32 values, int at, float (&pair)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair[0]), "=f"(pair[1])
                 : "r"(values + at * 4)
                 : "memory");
  }
  static DEVICE void positions(u32 values, int at, int (&pair)[2]) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(pair[0]), "=r"(pair[1])
                 : "r"(values + (TOKENS + at) * 4)
                 : "memory");
  }
};

template <class Type>
constexpr bool is_byte = Type::bytes == 1;

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

// The sums of two adjacent tokens and two rows (r, r + 8) before the last rounding: scaled and, if the rows
// are of a query or key head, rotated.
template <int TOKENS>
DEVICE void finish_sums(const Epilogue& e, const RowConstants& rows, int group, u32 values, int at,
                        const float* sums, float (&low)[2], float (&high)[2]) {
  float x_scale[2];
  TokenValues<TOKENS>::x_scales(values, at, x_scale);
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    low[next] = finish(e, rows, 0, x_scale[next], sums[next]);
    high[next] = finish(e, rows, 1, x_scale[next], sums[2 + next]);
  }
#if EPILOGUE == 2
  if (16 * group >= (NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE) return;
  int position[2];
  TokenValues<TOKENS>::positions(values, at, position);
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    TokenConstants t;
    load_rotation(e, group, position[next], t);
    low[next] = round_to<MODEL_TYPE>(low[next]);
    high[next] = round_to<MODEL_TYPE>(high[next]);
    rotate(t, low[next], high[next]);
  }
#endif
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

#if EPILOGUE == 2

// Units of a rotated head alternate between its halves; `turn` orders a tile's units so that
// adjacent threads store adjacent dimensions.
DEVICE void store_unit(const Epilogue& e, u32 staging, int line, int first_unit, int turn,
                       int token) {
  constexpr int UNITS = HEAD_SIZE / 8, ROTATED = NUM_HEADS + NUM_KV_HEADS;
  const int local = first_unit / UNITS < ROTATED ? turn % 4 * 2 + turn / 4 : turn;
  const int unit = first_unit + local, head = unit / UNITS, place = unit % UNITS;
  if (head >= ROTATED + NUM_KV_HEADS) return;
  const int half = HEAD_SIZE / 2;
  const int dim = head < ROTATED ? place % 2 * half + place / 2 * 8 : place * 8;
  const uint4 values = load_unit(staged(staging, line, local));
  if (head < NUM_HEADS) {
    *reinterpret_cast<uint4*>(e.out + (long long)token * e.width + head * HEAD_SIZE + dim) = values;
    return;
  }
  const int slot = e.slots[token];
  if (slot < 0) return;
  const int is_value = head >= ROTATED, kv_head = head - (is_value ? ROTATED : NUM_HEADS);
  KV_TYPE::Storage* to = cache_row(e, slot, is_value, kv_head) + dim;
  if constexpr (is_byte<KV_TYPE>) {
    const Divisor divisor(is_value ? e.v_scale : e.k_scale);
    *reinterpret_cast<uint2*>(to) = quantize_unit<KV_TYPE>(values, divisor);
  } else {
    *reinterpret_cast<uint4*>(to) = values;
  }
}

#else

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
        finish_sums<TOKENS>(e, rows, group, values, pass * STAGED_TOKENS + at,
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
  }
}

#endif

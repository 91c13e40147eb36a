// Where a warpgroup of the kernel for many tokens puts the results of a tile before it stores them, and the
// constants of the tile's tokens.
//
// The staging area of a warpgroup is [64 tokens][8 units of 8 values of the model type]; a unit, 16 bytes, lies
// at unit XOR (token % 8).
#pragma once

#include "ops/packed_linear/quantize.cuh"

constexpr int STAGED_TOKENS = 64;
constexpr int STAGING_BYTES = STAGED_TOKENS * 128;
constexpr int PASSES = (TILE_TOKENS + STAGED_TOKENS - 1) / STAGED_TOKENS;  // the last one may have fewer tokens

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
      x_scale[i] = PER_TOKEN && at < TOKENS ? load_x_scale(e, token) : 1.0f;
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
        if (PER_TOKEN) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(values + at * 4), "f"(x_scale[i]) : "memory");
        }
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
  static DEVICE int position_at(u32 values, int at) {
    int position;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(position)
                 : "r"(values + (TOKENS + at) * 4)
                 : "memory");
    return position;
  }
};

template <class Type>
constexpr bool is_byte = Type::bytes == 1;

// How a warpgroup of the kernel for many tokens rotates query and key heads, and stores them and values.
//
// Sums are staged before they are rotated: then a thread has adjacent dimensions of both halves of a head, and
// reads its cosines and sines 16 bytes at a time.
#pragma once

#include "backends/cuda/sm90/pairs.cuh"
#include "ops/packed_linear/prefill_staging.cuh"

static_assert(WG_TILES == 1, "sums of two row tiles leave too few registers");

// `rotate` of epilogue_values.cuh for two dimensions d and two dimensions d + HEAD_SIZE / 2.
DEVICE void rotate_pairs(u32& left, u32& right, u32 cos, u32 sin) {
  typedef Pairs<MODEL_TYPE> Pair;
  const u32 a = left, b = right;
  left = Pair::subtract(Pair::multiply(a, cos), Pair::multiply(b, sin));
  right = Pair::add(Pair::multiply(b, cos), Pair::multiply(a, sin));
}

// Two units of each of LINES tokens, which a thread rotates and stores: rows 16 i to 16 i + 15 of a tile.
template <int TOKENS>
struct Stored {
  static constexpr int LINES = STAGED_TOKENS * 4 / 128;
  static constexpr int UNITS = HEAD_SIZE / 8, ROTATED = NUM_HEADS + NUM_KV_HEADS;
  float4 factors[LINES][4];  // eight cosines and eight sines
  int slots[LINES];          // of the cache

  static DEVICE int line(int i) { return i * 32 + threadIdx.x % 128 / 4; }
  static DEVICE int first_unit(int row_tile) { return row_tile * 8 + threadIdx.x % 4 * 2; }

  // All reads together, before the first is used: one after another they take longer than all else that the
  // end of a tile does.
  DEVICE void load(const Epilogue& e, int row_tile, int token1, u32 values, int at) {
    const int head = first_unit(row_tile) / UNITS, place = first_unit(row_tile) % UNITS;
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      const int position = TokenValues<TOKENS>::position_at(values, at + line(i));
      const float* from = e.rotary + (long long)position * HEAD_SIZE + place / 2 * 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // also of values, so that nothing of before is kept in registers
        const float* its = from + j / 2 * (HEAD_SIZE / 2) + j % 2 * 4;
        factors[i][j] = __ldg(reinterpret_cast<const float4*>(its));
      }
      const int token = token1 + line(i);
      slots[i] = head >= NUM_HEADS && token < e.tokens ? e.slots[token] : -1;
    }
  }

  DEVICE void rotate_units(int i, uint4& left, uint4& right) const {
    const float4(&f)[4] = factors[i];
    rotate_pairs(left.x, right.x, pack(f[0].x, f[0].y), pack(f[2].x, f[2].y));
    rotate_pairs(left.y, right.y, pack(f[0].z, f[0].w), pack(f[2].z, f[2].w));
    rotate_pairs(left.z, right.z, pack(f[1].x, f[1].y), pack(f[3].x, f[3].y));
    rotate_pairs(left.w, right.w, pack(f[1].z, f[1].w), pack(f[3].z, f[3].w));
  }
  static DEVICE u32 pack(float low, float high) { return MODEL_TYPE::pack_pair(low, high); }

  DEVICE void store(const Epilogue& e, int row_tile, int token1, u32 staging) const {
    const int unit = first_unit(row_tile), head = unit / UNITS, place = unit % UNITS;
    if (head >= ROTATED + NUM_KV_HEADS) return;
    const int dim = head < ROTATED ? place / 2 * 8 : place * 8;
    const int apart = head < ROTATED ? HEAD_SIZE / 2 : 8;
    const int is_value = head >= ROTATED, kv_head = head - (is_value ? ROTATED : NUM_HEADS);
    const Divisor divisor(is_value ? e.v_scale : e.k_scale);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      const int token = token1 + line(i);
      uint4 left = load_unit(staged(staging, line(i), threadIdx.x % 4 * 2));
      uint4 right = load_unit(staged(staging, line(i), threadIdx.x % 4 * 2 + 1));
      if (head < ROTATED) rotate_units(i, left, right);
      if (head < NUM_HEADS) {
        if (token >= e.tokens) continue;
        OUT_TYPE::Storage* to = e.out + (long long)token * e.width + head * HEAD_SIZE + dim;
        *reinterpret_cast<uint4*>(to) = left;
        *reinterpret_cast<uint4*>(to + apart) = right;
      } else if (slots[i] >= 0) {
        KV_TYPE::Storage* to = cache_row(e, slots[i], is_value, kv_head) + dim;
        if constexpr (is_byte<KV_TYPE>) {
          *reinterpret_cast<uint2*>(to) = quantize_unit<KV_TYPE>(left, divisor);
          *reinterpret_cast<uint2*>(to + apart) = quantize_unit<KV_TYPE>(right, divisor);
        } else {
          *reinterpret_cast<uint4*>(to) = left;
          *reinterpret_cast<uint4*>(to + apart) = right;
        }
      }
    }
  }
};

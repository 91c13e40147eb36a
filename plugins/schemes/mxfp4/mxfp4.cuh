// 4-bit weights (packing.py has their layout) as E4M3 numbers in registers, ready to be multiplied.
#pragma once

#include "backends/cuda/sm90/held_product.cuh"

constexpr int MXFP4_STEPS = 15, MXFP4_TABLE_BYTES = 128;  // 16 places, the last of which is unused
constexpr int MXFP4_OCTET_BYTES = 1088;  // 8 rows by 256 columns: codes, then steps
constexpr int MXFP4_CODE_BYTES = 1024;

// The E4M3 numbers of the eight magnitudes at a step, 0, 0.5, 1, 1.5 | 2, 3, 4, 6 times 2**(step - 8).
DEVICE uint2 mxfp4_numbers(int step) {
  const float power = __uint_as_float(u32(step - 8 + 127) << 23);
  const u32 low = E4M3::pack_pair(0.0f, 0.5f * power), high = E4M3::pack_pair(power, 1.5f * power);
  const u32 two = E4M3::pack_pair(2.0f * power, 3.0f * power);
  const u32 four = E4M3::pack_pair(4.0f * power, 6.0f * power);
  return {low | high << 16, two | four << 16};
}

// Writes the table of all steps; `table` is a multiple of 256. A barrier of the whole block must follow.
DEVICE void make_mxfp4_table(u32 table) {
  if (threadIdx.x < MXFP4_STEPS) {
    const uint2 numbers = mxfp4_numbers(threadIdx.x);
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(table + threadIdx.x * 8), "r"(numbers.x),
                 "r"(numbers.y)
                 : "memory");
  }
}

DEVICE u32 permute(u32 low, u32 high, u32 which) {  // bytes by the nibbles of `which`, all below 8
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
  return y;
}

// The upper half of `which`, magnitudes of codes, in both halves. A multiplication of half-precision numbers by one:
// what limits expanding is the pipe of shifts, ANDs and permutations. Bit 11 of a half is 0, so none is infinite or
// a NaN.
DEVICE u32 upper_half(u32 which) {
  u32 y;
  asm("{\n.reg .b16 low, high;\n.reg .b32 both, one;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 both, {high, high};\n"
      "mov.b32 one, 0x3C003C00;\n"
      "mul.rn.f16x2 %0, both, one;\n}"
      : "=r"(y)
      : "r"(which));
  return y;
}

// Eight columns of one row as two registers of four.
DEVICE void expand_word(u32 word, const uint2& numbers, u32& left, u32& right) {
  const u32 which = word & 0x77777777;
  left = permute(numbers.x, numbers.y, which) | (word & 0x80808080);
  right = permute(numbers.x, numbers.y, upper_half(which)) | ((word << 4) & 0x80808080);
}

DEVICE uint4 load_shared(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at));
  return x;
}
DEVICE uint2 load_shared_pair(u32 at) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}

// What a thread needs of 16 rows of its warp by 256 columns, read from shared memory: all reads
// are issued before the first is used. `octets` are two groups of 8 rows.
struct Mxfp4Chunk {
  uint4 codes[2][2];    // [octet][half of the columns]
  uint2 numbers[2][8];  // [octet][block of 32 columns]: of the block's power of two

  Mxfp4Chunk() = default;
  DEVICE Mxfp4Chunk(u32 table, u32 octets) { load(table, octets); }

  DEVICE void load(u32 table, u32 octets) {
    const u32 lane = threadIdx.x % 32;
    uint2 steps[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      steps[r] = load_shared_pair(octets + r * MXFP4_OCTET_BYTES + MXFP4_CODE_BYTES + lane / 4 * 8);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[r][half] = load_shared(octets + r * MXFP4_OCTET_BYTES + half * 512 + lane * 16);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Unfilled slots must not cause wrong addresses: every masked byte is a valid offset in the table.
      const u32 offsets[2] = {steps[r].x & 0x78787878, steps[r].y & 0x78787878};
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // the table's address with the offset as its lowest byte
        numbers[r][i] = load_shared_pair(permute(offsets[i / 4], table, 0x7650 | i % 4));
      }
    }
  }

  // The operands of N of the eight products along K, from the first one on: all, or a half.
  template <int N>
  DEVICE void expand(int first, u32 (&a)[N][4]) const {
    static_assert(N == 4 || N == 8, "a half of the columns is four products");
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int k = first + i;
        const uint4& held = codes[r][k / 4];
        const u32 words[4] = {held.x, held.y, held.z, held.w};
        expand_word(words[k % 4], numbers[r][k], a[i][r], a[i][2 + r]);
      }
    }
  }
};

HELD_PRODUCT(8, I4, 4, 5, 6, 7, 8, 9, D4(0))
HELD_PRODUCT(16, I8, 8, 9, 10, 11, 12, 13, D8(0))
HELD_PRODUCT(24, I12, 12, 13, 14, 15, 16, 17, D8(0), D4(8))
HELD_PRODUCT(32, I16, 16, 17, 18, 19, 20, 21, D16(0))
HELD_PRODUCT(48, I24, 24, 25, 26, 27, 28, 29, D16(0), D8(16))
HELD_PRODUCT(64, I32, 32, 33, 34, 35, 36, 37, D32(0))

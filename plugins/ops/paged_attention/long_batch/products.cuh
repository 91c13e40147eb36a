// Products of long_batch.cu: a warpgroup's 64 rows (M) are a tile's keys, or 64 dimensions of its values, and the columns
// (N) are query rows, whose number need not be a multiple of 64. Keys and values go from bytes in shared memory to A
// operands in registers, so the converted values are never stored. Bits are those of the other kernels: the same 16
// products at a time, in the same order.
#pragma once

#define COLUMNS 8
#define QUERY_BYTES (SIZE * 16)
#include "ops/paged_attention/batch/state.cuh"

constexpr int SUMS = ROWS / 2;        // of a thread, of a product with 64 rows
constexpr int WARPGROUP = 128;        // threads
constexpr int HALF_BYTES = ROWS * 128;   // 64 dimensions of all rows of queries
constexpr int LOGIT_BYTES = KEYS * 4;    // of a row
static_assert(SIZE == 128 && IS_BYTE, "a warp has two of eight chunks of the values");
static_assert(ROWS % 8 == 0 && ROWS <= WARPGROUP, "a thread for each row");

// d[64 x N] = (add ? d : 0) + a[64 x 16] b[N x 16]^T.
template <int N>
struct Columns;
#define COLUMN_PRODUCT(N, LIST, A0, A1, A2, A3, B, P, ...)                                        \
  template <>                                                                                   \
  struct Columns<N> {                                                                           \
    static DEVICE void add(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" LIST "}, {%" #A0   \
                   ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"                   \
                   : __VA_ARGS__                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }                                                                                           \
  };
COLUMN_PRODUCT(48, I24, 24, 25, 26, 27, 28, 29, D24(0))
COLUMN_PRODUCT(88, I44, 44, 45, 46, 47, 48, 49, D44(0))

DEVICE void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void store_shared(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
DEVICE void store_float(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
DEVICE void store_pair_of(u32 to, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}
DEVICE float2 load_pair_of(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}
DEVICE void store_four(u32 to, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
DEVICE float4 load_four(u32 from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

DEVICE int own_warp() { return threadIdx.x / 32 % 4; }  // of the warpgroup

// ---- logits[keys, rows of queries] ----

// A warp's 16 keys as left operands, 16 dimensions each.
DEVICE void load_keys(u32 (&a)[STEPS][4], u32 tile) {
  const u32 first = tile + place(16 * own_warp() + lane_id() % 16, lane_id() / 16);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
    u32 x[4];
    load_matrices(x, first ^ (chunk << 4));
    Widen<KV_TYPE>::pairs(x[0], a[chunk][0], a[chunk][2]);
    Widen<KV_TYPE>::pairs(x[1], a[chunk][1], a[chunk][3]);
    Widen<KV_TYPE>::pairs(x[2], a[chunk + 1][0], a[chunk + 1][2]);
    Widen<KV_TYPE>::pairs(x[3], a[chunk + 1][1], a[chunk + 1][3]);
  }
}
DEVICE void start_logits(float (&s)[SUMS], const u32 (&keys)[STEPS][4], u32 queries) {
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    Columns<ROWS>::add(s, keys[i], operand(queries + i / 4 * HALF_BYTES) + i % 4 * 2, i > 0);
  }
  product_commit();
}

// Stores logits row by row, four keys a chunk; chunks of eight rows that are read together fall on all banks.
DEVICE u32 logit_place(int row, int chunk) { return row * LOGIT_BYTES + ((chunk ^ (row & 7)) << 4); }
DEVICE void store_logits(u32 logits, const float (&s)[SUMS]) {
  const int key = 16 * own_warp() + lane_id() / 4, row = lane_id() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const u32 to = logits + logit_place(row + e, key / 4 + 2 * h) + key % 4 * 4;
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) store_float(to + j * (8 * LOGIT_BYTES), s[4 * j + 2 * h + e]);
    }
  }
}

// ---- sums[dimensions, rows of queries] += values times weights ----

// A thread has of 64 dimensions b and of rows 8 j to 8 j + 7 four sums, which are stored together: of rows 2 (lane % 4)
// and the next, of a dimension, then of the next dimension.
DEVICE int own_dimension(int b) { return 64 * b + 16 * own_warp() + lane_id() / 4 * 2; }

// Two times 16 dimensions of a warp as left operands, 16 keys each.
DEVICE void load_values(u32 (&a)[2][BLOCKS][4], u32 tile) {
  const int lane = lane_id();
  const u32 first = tile + place(lane / 8 % 2 * 8 + lane % 8, own_warp() + lane / 16 * 4);
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    u32 x[4];
    load_transposed(x, first + block * 16 * LINE);
#pragma unroll
    for (int b = 0; b < 2; ++b) {  // a lane has two dimensions of two keys: pair the keys
      u32(&y)[4] = a[b][block];
      Widen<KV_TYPE>::pairs(__byte_perm(x[2 * b], 0, 0x3120), y[0], y[1]);
      Widen<KV_TYPE>::pairs(__byte_perm(x[2 * b + 1], 0, 0x3120), y[2], y[3]);
    }
  }
}

// Weights of eight rows are an atom of 1,024 bytes where their logits were.
constexpr int ATOM_STEP = 8 * LOGIT_BYTES;
DEVICE u32 weight_place(int row, int part) {
  return row / 8 * ATOM_STEP + row % 8 * 128 + ((part ^ (row & 7)) << 4);
}
DEVICE u64 weight_operand(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(ATOM_STEP >> 4) << 32) |
         (u64(1) << 62);
}
DEVICE void start_values(float (&sums)[2][SUMS], const u32 (&values)[2][BLOCKS][4], u32 weights,
                         bool add) {
  const u64 b = weight_operand(weights);
  keep_order(sums[0]), keep_order(sums[1]);
  product_fence();
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Columns<ROWS>::add(sums[half], values[half][block], b + block * 2, block > 0 || add);
    }
  }
  product_commit();
}

// FP8 products of few rows (chunk_fp8/reference.py has the arithmetic): a tile's keys, and the dimensions of its values,
// are the 64 rows (M) of a product, and query rows are its columns (N), so that few query rows cost little. A warpgroup
// has 64 keys and then 64 dimensions; both warpgroups get all softmax weights, through shared memory.
//
// Thread 4 g + t of warp w has keys 16 w + g and 16 w + g + 8, for columns 2 t and 2 t + 1 of every eight. The softmax
// weights of a column are 128 bytes, in which of every 16 keys g and g + 8 are adjacent. The A operand of values is read
// in blocks of 16 dimensions by 8 keys, transposed; a thread then has dimensions 2 g and 2 g + 1 of 16.
#pragma once

#include "ops/paged_attention/chunk_fp8/raising.cuh"
#include "ops/paged_attention/few_fp8/places.cuh"

#if ROWS == 8
HELD_PRODUCT(8, I4, 4, 5, 6, 7, 8, 9, D4(0))
#elif ROWS == 32
HELD_PRODUCT(32, I16, 16, 17, 18, 19, 20, 21, D16(0))
#elif ROWS == 48
HELD_PRODUCT(48, I24, 24, 25, 26, 27, 28, 29, D24(0))
#elif ROWS == 88
HELD_PRODUCT(88, I44, 44, 45, 46, 47, 48, 49, D44(0))
#endif

constexpr int AHEAD = 3;           // pairs are loaded so many blocks of columns before they are used
constexpr int DEEP = 4;            // products of 32 along a head, or a tile's keys
constexpr int HELD = ROWS / 2;     // of a product, a thread
constexpr int BLOCKS = ROWS / 8;   // of columns
constexpr int HALF_WAY = BLOCKS / 2;

// Where a thread is among those that compute.
struct Own {
  int warpgroup, warp, g, t;

  DEVICE Own() {
    const int thread = threadIdx.x - THREADS;
    warpgroup = __shfl_sync(~0u, thread / 128, 0), warp = __shfl_sync(~0u, thread / 32 % 4, 0);
    g = thread % 32 / 4, t = thread % 4;
  }
  // The same, from which nothing is derived before a loop, where it would take registers.
  DEVICE Own here() const {
    Own its = *this;
    hold_back(its.g), hold_back(its.t);
    return its;
  }
  DEVICE int key() const { return 64 * warpgroup + 16 * warp + g; }
  DEVICE int dimension() const { return 64 * warpgroup + 16 * warp + 2 * g; }
};

DEVICE void start_logits(float (&s)[HELD], u32 keys, u32 queries) {
  const u64 a = operand(keys), b = operand(queries);
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < DEEP; ++i) Product<E4M3, ROWS>::add(s, a + 2 * i, b + 2 * i, i > 0);
  product_commit();
}

// Weights times values.
DEVICE void start_sums(float (&sums)[HELD], const u32 (&values)[DEEP][4], u32 weights, bool add) {
  const u64 b = operand(weights);
  keep_order(sums);
  product_fence();
#pragma unroll
  for (int i = 0; i < DEEP; ++i) HeldProduct<ROWS>::add(sums, values[i], b + 2 * i, i > 0 || add);
  product_commit();
}

// Sums of weights, 64 rows after the other, as products with ones: thread 4 g + t of warp w has those of rows 16 w + g and 8 behind.
// What it has of rows that do not exist are sums of something else.
struct Totals {
  static constexpr int COUNT = (ROWS + 63) / 64;
  float its[COUNT][4];

  template <class Visit>
  DEVICE void visit(const Visit& with) {
    const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + 64 * i + 8 * half;
        if (row < ROWS) with(row, its[i][2 * half]);
      }
    }
  }
  DEVICE void wait() {
    product_wait<0>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) keep_order(its[i]);
  }
  DEVICE void start(u32 weights, u32 ones, bool add) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) keep_order(its[i]);
    product_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const u64 a = operand(weights + i * 64 * 128), b = operand(ones);
#pragma unroll
      for (int k = 0; k < DEEP; ++k) Product<E4M3, 8>::add(its[i], a + 2 * k, b + 2 * k, k > 0 || add);
    }
    product_commit();
  }
};

// A warp's 16 dimensions of a tile's values, and the same as left operands. Those of keys from `left` on are zeros: a NaN times a
// weight of zero would still be a NaN.
DEVICE void load_values(u32 (&x)[DEEP][4], u32 values, const Own& own) {
  const int lane = lane_id();
  const u32 from = values + lane * 128 + ((4 * own.warpgroup + own.warp ^ lane & 7) << 4);
#pragma unroll
  for (int i = 0; i < DEEP; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                 : "r"(from + i * 4096)
                 : "memory");
  }
}
DEVICE void arrange_values(u32 (&x)[DEEP][4], const Own& own, int left) {
#pragma unroll
  for (int i = 0; i < DEEP; ++i) {
    const u32 y[4] = {x[i][0], x[i][1], x[i][2], x[i][3]};
    x[i][0] = __byte_perm(y[0], y[1], 0x6240), x[i][1] = __byte_perm(y[0], y[1], 0x7351);
    x[i][2] = __byte_perm(y[2], y[3], 0x6240), x[i][3] = __byte_perm(y[2], y[3], 0x7351);
  }
  if (left >= KEYS) return;
#pragma unroll
  for (int i = 0; i < DEEP; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 kept = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int key = 32 * i + 16 * half + 2 * own.t + k / 2 + k % 2 * 8;
        kept |= key < left ? 0xFFu << 8 * k : 0u;
      }
      x[i][2 * half] &= kept, x[i][2 * half + 1] &= kept;
    }
  }
}

// Logits of keys that a row does not see. `first`: key of the tile.
DEVICE void mask(float (&s)[HELD], const Columns& columns, const Own& anywhere, int first) {
  const Own own = anywhere.here();
  const int key = first + own.key();
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int last = columns.last_key[8 * j + 2 * own.t + e];
      if (key > last) s[4 * j + e] = minus_infinity();
      if (key + 8 > last) s[4 * j + 2 + e] = minus_infinity();
    }
  }
}

// Volatile, so that they stay in the order in which they are written: a pair is loaded long before it is used.
DEVICE float4 load_pair(u32 from) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
  return x;
}
// Eight columns' weights of a warp's 16 keys, or those of four times eight: a lane has the address of a column.
DEVICE void store_weights(u32 to, u32 x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(x) : "memory");
}
DEVICE void store_weights(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Weights of a tile; whether a logit may raise its row's base. `half_way` is done in the middle: what waits for products that run.
template <class HalfWay>
DEVICE bool weigh(const float (&s)[HELD], const Columns& columns, const Own& anywhere, u32 weights, const HalfWay& half_way) {
  const Own own = anywhere.here();
  Raising raising;
  const u32 lane = 4 * own.g + own.t, column = lane % 8, chunk = 4 * own.warpgroup + own.warp;
  const u32 to = weights + lane * 128 + ((chunk ^ column) << 4);
  const u32 pairs = shared_address(columns.pairs) + own.t * sizeof(Pair);
  float4 by[BLOCKS];  // pairs
  u32 its[BLOCKS];    // weights: keys g and g + 8 of column 2 t, then of the next
#pragma unroll
  for (int j = 0; j < (AHEAD < BLOCKS ? AHEAD : BLOCKS); ++j) by[j] = load_pair(pairs + j * 4 * sizeof(Pair));
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    if (j == HALF_WAY) half_way();
    if (j + AHEAD < BLOCKS) by[j + AHEAD] = load_pair(pairs + (j + AHEAD) * 4 * sizeof(Pair));
    const float* x = &s[4 * j];
    const float a = __fmaf_rn(x[0], by[j].x, by[j].z), b = __fmaf_rn(x[2], by[j].x, by[j].z);
    const float c = __fmaf_rn(x[1], by[j].y, by[j].w), d = __fmaf_rn(x[3], by[j].y, by[j].w);
    its[j] = E4M3::pack_pair(exp2(a), exp2(b)) | u32(E4M3::pack_pair(exp2(c), exp2(d))) << 16;
    raising.note(its[j]);
    if (BLOCKS < 4) {
      store_weights(to + j * 1024, its[j]);  // addresses of lanes beyond 7 are not used
    } else if (j % 4 == 3 || j == BLOCKS - 1) {
      const int first = j - 3;  // at the end some are stored once more
      store_weights(to + first * 1024, its[first], its[first + 1], its[first + 2], its[j]);
    }
  }
  return raising.any();
}

// A logit as an integer of the same order, and back; of NaN the least. Its scale is positive.
constexpr int NO_TOP = 0x80000000;
DEVICE int ordered(float x) {
  const int bits = __float_as_uint(x);
  return x == x ? bits ^ (bits >> 31 & 0x7FFFFFFF) : NO_TOP;
}
DEVICE float of_ordered(int x) { return x == NO_TOP ? minus_infinity() : __uint_as_float(x ^ (x >> 31 & 0x7FFFFFFF)); }

// One step of a comparison by two lanes: each gives half of its numbers and keeps the larger ones of the other half.
template <int COUNT>
DEVICE void halve(float (&x)[COUNT], bool keeps_second, int lanes) {
  constexpr int HALF = (COUNT + 1) / 2;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float second = i + HALF < COUNT ? x[i + HALF] : minus_infinity();
    const float given = keeps_second ? x[i] : second, kept = keeps_second ? second : x[i];
    x[i] = fmaxf(kept, __shfl_xor_sync(~0u, given, lanes));
  }
}

// The largest logits of a tile, for all rows.
DEVICE void find_tops(const float (&s)[HELD], int (&tops)[ROWS], const Own& anywhere) {
  const Own own = anywhere.here();
  constexpr int COUNT = 2 * BLOCKS, HALF = (COUNT + 1) / 2, QUARTER = (HALF + 1) / 2, EIGHTH = (QUARTER + 1) / 2;
  float top[COUNT];
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    top[2 * j] = fmaxf(s[4 * j], s[4 * j + 2]), top[2 * j + 1] = fmaxf(s[4 * j + 1], s[4 * j + 3]);
  }
  halve(top, own.g & 4, 16);
  halve(*(float(*)[HALF])top, own.g & 2, 8);
  halve(*(float(*)[QUARTER])top, own.g & 1, 4);
#pragma unroll
  for (int i = 0; i < EIGHTH; ++i) {
    const int in_quarter = i + (own.g & 1) * EIGHTH, in_half = in_quarter + (own.g >> 1 & 1) * QUARTER;
    const int nth = in_half + (own.g >> 2) * HALF;
    const bool is_there = in_quarter < QUARTER && in_half < HALF && nth < COUNT;
    if (is_there) atomicMax(&tops[8 * (nth / 2) + 2 * own.t + nth % 2], ordered(top[i]));
  }
}

// A row's base in its work item's first tile, and where another one's logits raise it; whether the row has one that is far from zero.
DEVICE float first_base(int top, float scale) {
  const float its = __fmul_rn(of_ordered(top), scale);
  return its > minus_infinity() ? its : minus_infinity();
}
DEVICE bool put_base(Columns& columns, int row, float base) {
  columns.base[row] = base, columns.shift(row) = __fsub_rn(WEIGHT_POWER, finite(base));
  return columns.last_key[row] >= 0 && !(fabsf(base) < FAR_BASE);
}
DEVICE bool raise(Columns& columns, int row) {
  const float top = __fmul_rn(of_ordered(columns.top[1][row]), columns.scale(row));
  columns.top[1][row] = NO_TOP;
  const float before = columns.base[row], base = top > __fadd_rn(before, RAISE) ? top : before;
  columns.fade[row] = exp2(__fsub_rn(before, finite(base)));
  return put_base(columns, row, base);
}

// Sums times a factor of each row.
DEVICE void fade_sums(float (&sums)[HELD], const float (&factors)[ROWS], int t) {
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const float2 by = *(const float2*)&factors[8 * j + 2 * t];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] = __fmul_rn(sums[4 * j + i], i % 2 ? by.y : by.x);
  }
}

// Work items of few_fp8.cu, and how rows are written. The block that has a context's beginning merges its work items from
// left to right as they are computed; other blocks store theirs, which are merged later (stored.cuh).
//
// Sums are stored as threads hold them, four numbers at a time: dimensions 2 g and 2 g + 1 of two rows.
#pragma once

#include "ops/paged_attention/few_fp8/products.cuh"

constexpr int FOURS = ROWS * SIZE / 4;  // of a stored work item

struct Entries {
  float* partial;
  int room;  // of how many work items

  DEVICE float4* sums(int entry) const { return (float4*)partial + (long long)entry * FOURS; }
  DEVICE float2* states(int entry) const {
    return (float2*)((float4*)partial + (long long)room * FOURS) + (long long)entry * ROWS;
  }
};

// Who merges a context's work items, and where those of a shared context are stored, which is its thread blocks' only one: the first
// entry has what was merged of its beginning.
struct Kept {
  bool is_shared, merges;
  int first_entry, first_unit;

  DEVICE explicit Kept(const volatile Place& place) {
    is_shared = place.count > 1, merges = !is_shared || place.nth == 0;
    first_entry = is_shared ? place.first_entry : 0, first_unit = is_shared ? place.first_unit : 0;
  }
  DEVICE int entry_of(int unit) const { return first_entry + unit - first_unit + 1; }
};

// What a thread block computes: some tokens of one request, for one KV head.
struct Part {
  int head, token, rows;  // the first of the step's tokens
};

DEVICE void meet_computing() { asm volatile("barrier.sync %0, %1;" ::"r"(2), "n"(COMPUTING) : "memory"); }

// By how much what has been merged of a row, and a work item behind it, are multiplied.
struct Factors {
  float base, left, right;

  DEVICE Factors(float all, float its) {
    base = fmaxf(all, its);
    const float from = finite(base);
    left = exp2(__fsub_rn(all, from)), right = exp2(__fsub_rn(its, from));
  }
};
DEVICE float joined(float all, float left, float its, float right) { return __fmaf_rn(all, left, __fmul_rn(its, right)); }

// A row's work item, as far as its chains are complete.
struct ItemState {
  float base, total;

  DEVICE void clear() { base = minus_infinity(), total = 0.0f; }
  DEVICE float fade(float to) const { return exp2(__fsub_rn(base, finite(to))); }
  DEVICE void append(float its_base, float its_total) {
    total = __fmaf_rn(total, fade(its_base), its_total), base = its_base;
  }
};

// The state of a row's complete work item is merged into the row's, or it is stored.
DEVICE void finish_row(Columns& columns, int row, const ItemState& item, bool merges, float2* state) {
  if (!merges) {
    __stcg(state + row, make_float2(item.base, item.total));
    return;
  }
  const Factors by(columns.all_base[row], item.base);
  columns.left[row] = by.left, columns.right[row] = by.right, columns.all_base[row] = by.base;
  columns.all_total[row] = joined(columns.all_total[row], by.left, item.total, by.right);
}

// Sums of a complete chain are added to its work item's, or they are its first ones.
DEVICE void append_chain(float (&item)[HELD], const float (&sums)[HELD], const Columns& columns, const Own& anywhere, bool has_raised,
                         bool is_new) {
  if (is_new) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) item[i] = __fadd_rn(0.0f, sums[i]);
    return;
  }
  if (!has_raised) {  // all factors are one
#pragma unroll
    for (int i = 0; i < HELD; ++i) item[i] = __fadd_rn(item[i], sums[i]);
    return;
  }
  const Own own = anywhere.here();
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const float2 by = *(const float2*)&columns.chain_fade[8 * j + 2 * own.t];
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) item[i] = __fmaf_rn(item[i], i % 2 ? by.y : by.x, sums[i]);
  }
}

// Which of the fours of a work item, or of what has been merged, a thread has for eight rows.
DEVICE int nth_four(int j) { return j * COMPUTING + int(threadIdx.x) - THREADS; }

// What has been merged of a context: of every thread four numbers for each eight rows. Where a thread block's work items are
// stored instead, one on its way there.
struct MergedSums {
  float4* fours;

  DEVICE explicit MergedSums(u8* memory) : fours((float4*)(memory + Places::MERGED_AT)) {}
  DEVICE float4& of(int j) const { return fours[nth_four(j)]; }

  // All of them, by one of those who compute; they stay as they are until `stores_are_read`.
  DEVICE void store(float4* to) const {
    shared_fence();
    meet_computing();
    store_block(threadIdx.x == THREADS, to, shared_address(fours), FOURS * 16);
  }
};

// And a work item's sums, when that is done. Those stored before have been read.
DEVICE void finish_sums(const float (&item)[HELD], const Columns& columns, const Own& anywhere, bool merges, const MergedSums& all,
                        float4* to) {
  const Own own = anywhere.here();
  if (!merges) {
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) all.of(j) = make_float4(item[4 * j], item[4 * j + 1], item[4 * j + 2], item[4 * j + 3]);
    all.store(to);
    return;
  }
  constexpr int TOGETHER = 4;  // blocks whose numbers are loaded before any is stored, which a load might have to wait for
#pragma unroll
  for (int first = 0; first < BLOCKS; first += TOGETHER) {
    float4 x[TOGETHER];
    float2 left[TOGETHER], right[TOGETHER];
#pragma unroll
    for (int k = 0; k < TOGETHER && first + k < BLOCKS; ++k) {
      const int row = 8 * (first + k) + 2 * own.t;
      x[k] = all.of(first + k), left[k] = *(const float2*)&columns.left[row], right[k] = *(const float2*)&columns.right[row];
    }
#pragma unroll
    for (int k = 0; k < TOGETHER && first + k < BLOCKS; ++k) {
      const float* its = &item[4 * (first + k)];
      all.of(first + k) = make_float4(joined(x[k].x, left[k].x, its[0], right[k].x), joined(x[k].y, left[k].y, its[1], right[k].y),
                                      joined(x[k].z, left[k].x, its[2], right[k].x), joined(x[k].w, left[k].y, its[3], right[k].y));
    }
  }
}

// Two dimensions of a row.
DEVICE void write_two(OUT_TYPE::Storage* out, const Part& part, int row, int dimension, float x, float y, float factor,
                      float quanta) {
  if (row >= part.rows) return;
  const long long token = part.token + row / GROUP;
  store_pair(out + ((token * HEADS + part.head) * GROUP + row % GROUP) * SIZE + dimension,
             finish_pair(x, y, factor, quanta));
}
DEVICE void write_rows(const MergedSums& all, const Columns& columns, const Own& own, const Part& part,
                       OUT_TYPE::Storage* out, float value_scale, float quanta) {
  int first = 2 * own.t;
  hold_back(first);
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const float4 x = all.of(j);
    const int row = 8 * j + first;
    write_two(out, part, row, own.dimension(), x.x, x.z, __fdiv_rn(value_scale, columns.all_total[row]), quanta);
    write_two(out, part, row + 1, own.dimension(), x.y, x.w, __fdiv_rn(value_scale, columns.all_total[row + 1]), quanta);
  }
}

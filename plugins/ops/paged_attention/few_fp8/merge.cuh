// Work items of few_fp8.cu: merged from left to right as they come, by whoever has a context's beginning, or stored and then merged by
// all thread blocks that share the context; and how rows are written.
//
// What is stored of sums is what threads hold of them, four numbers at a time: dimensions 2 g and 2 g + 1 of two rows.
#pragma once

#include "ops/paged_attention/few_fp8/products.cuh"

constexpr int FOURS = ROWS * SIZE / 4;  // of a stored work item
constexpr int BATCH = 12;                // work items that a thread asks for together

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

DEVICE int nth_four(const Own& own, int block) {
  return (own.warpgroup * BLOCKS + block) * 128 + own.warp * 32 + lane_id();
}
DEVICE void store_sums(float4* to, const float (&x)[HELD], const Own& own) {
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    __stcg(to + nth_four(own, j), make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]));
  }
}

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

// The state of a row's chain is merged into its work item's, and that of a complete work item into the row's, or it is stored.
DEVICE void finish_row(Columns& columns, int row, float base, bool is_item, bool merges, float2* state) {
  const Factors by(columns.item_base[row], base);
  const float total = joined(columns.item_total[row], by.left, columns.total[row], by.right);
  columns.left[row] = by.left, columns.right[row] = by.right;
  columns.item_base[row] = is_item ? minus_infinity() : by.base, columns.item_total[row] = is_item ? 0.0f : total;
  if (!is_item) return;
  if (!merges) {
    __stcg(state + row, make_float2(by.base, total));
    return;
  }
  const Factors to(columns.all_base[row], by.base);
  columns.all_left[row] = to.left, columns.all_right[row] = to.right, columns.all_base[row] = to.base;
  columns.all_total[row] = joined(columns.all_total[row], to.left, total, to.right);
}

// What has been merged of a context: of every thread four numbers for each eight rows.
struct MergedSums {
  float4* own;

  DEVICE explicit MergedSums(u8* memory) : own((float4*)(memory + Places::MERGED_AT) + (threadIdx.x - THREADS)) {}
  DEVICE float4& of(int j) const { return own[j * COMPUTING]; }
};

// And their sums, when that is done.
DEVICE void finish_sums(float (&item)[HELD], const float (&sums)[HELD], const Columns& columns, const Own& own, bool is_item,
                        bool merges, const MergedSums& all, float4* to) {
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const float2 left = *(const float2*)&columns.left[8 * j + 2 * own.t];
    const float2 right = *(const float2*)&columns.right[8 * j + 2 * own.t];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      item[4 * j + i] = joined(item[4 * j + i], i % 2 ? left.y : left.x, sums[4 * j + i], i % 2 ? right.y : right.x);
    }
  }
  if (!is_item) return;
  if (!merges) store_sums(to, item, own);
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    if (merges) {
      const float2 left = *(const float2*)&columns.all_left[8 * j + 2 * own.t];
      const float2 right = *(const float2*)&columns.all_right[8 * j + 2 * own.t];
      float4 x = all.of(j);
      x.x = joined(x.x, left.x, item[4 * j], right.x), x.y = joined(x.y, left.y, item[4 * j + 1], right.y);
      x.z = joined(x.z, left.x, item[4 * j + 2], right.x), x.w = joined(x.w, left.y, item[4 * j + 3], right.y);
      all.of(j) = x;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) item[4 * j + i] = 0.0f;
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

DEVICE float4 load_four(const void* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"((const float4*)from));
  return x;
}

// Merges and writes what thread block `nth` of `sharing` takes of a context's `count` stored work items: dimensions 2 g and 2 g + 1 of
// two rows a thread.
DEVICE void merge_stored(const Entries& stored, int first_entry, int count, int nth, int sharing, const Part& part,
                         OUT_TYPE::Storage* out, float value_scale, float quanta) {
  const int each = (FOURS + sharing - 1) / sharing, end = min((nth + 1) * each, FOURS);
#pragma unroll 1
  for (int at = nth * each + int(threadIdx.x) - THREADS; at < end; at += COMPUTING) {
    const int lane = at % 32, warp = at / 32 % 4, block = at / 128 % BLOCKS, row = 8 * block + lane % 4 * 2;
    const float4* sums = stored.sums(first_entry) + at;
    const float2* states = stored.states(first_entry) + row;
    float all[4] = {0.0f, 0.0f, 0.0f, 0.0f}, base[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < count; first += BATCH) {
      float4 x[BATCH], its[BATCH];  // base and total of two rows
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int entry = min(first + i, count - 1);
        x[i] = load_four(sums + entry * FOURS), its[i] = load_four(states + entry * ROWS);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i >= count) its[i].x = its[i].z = minus_infinity(), its[i].y = its[i].w = 0.0f;
        const Factors by[2] = {Factors(base[0], its[i].x), Factors(base[1], its[i].z)};
        const bool is_there = first + i < count;  // what is not there leaves all as it is
        const float next[4] = {joined(all[0], by[0].left, x[i].x, by[0].right), joined(all[1], by[1].left, x[i].y, by[1].right),
                               joined(all[2], by[0].left, x[i].z, by[0].right), joined(all[3], by[1].left, x[i].w, by[1].right)};
        total[0] = joined(total[0], by[0].left, its[i].y, by[0].right);
        total[1] = joined(total[1], by[1].left, its[i].w, by[1].right);
        base[0] = by[0].base, base[1] = by[1].base;
#pragma unroll
        for (int k = 0; k < 4; ++k) all[k] = is_there ? next[k] : all[k];
      }
    }
    const int dimension = at / (128 * BLOCKS) * 64 + warp * 16 + lane / 4 * 2;
    write_two(out, part, row, dimension, all[0], all[2], __fdiv_rn(value_scale, total[0]), quanta);
    write_two(out, part, row + 1, dimension, all[1], all[3], __fdiv_rn(value_scale, total[1]), quanta);
  }
}

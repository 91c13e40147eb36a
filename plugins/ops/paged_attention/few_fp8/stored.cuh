// How the thread blocks of few_fp8.cu that share a context merge its stored work items, from left to right. Each block
// merges a part of the sums, in the groups of four numbers in which threads hold them (merge.cuh), over all work items.
#pragma once

#include "ops/paged_attention/few_fp8/merge.cuh"

constexpr int BATCH = 12;  // work items that a thread asks for together

DEVICE float4 load_four(const void* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"((const float4*)from));
  return x;
}

// The same, if it is wanted: without a branch, in which it would wait for all others.
DEVICE float4 load_four_if(bool is_wanted, const void* from) {
  float4 x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"((const float4*)from), "r"(u32(is_wanted)));
  return x;
}
DEVICE float2 load_two(const void* from) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"((const float2*)from));
  return x;
}

// What a thread holds of stored sums: its row, the next one is the other; its dimension.
DEVICE int row_of_four(int four) { return 8 * (four / COMPUTING) + four % 4 * 2; }
DEVICE int dimension_of_four(int four) { return four % COMPUTING / 32 * 16 + four % 32 / 4 * 2; }
DEVICE void write_four(OUT_TYPE::Storage* out, const Part& part, int four, const float (&x)[4], float factor, float next_factor,
                       float quanta) {
  const int row = row_of_four(four), dimension = dimension_of_four(four);
  write_two(out, part, row, dimension, x[0], x[2], factor, quanta);
  write_two(out, part, row + 1, dimension, x[1], x[3], next_factor, quanta);
}

// Merges what a context has stored, for `TIMES` fours of a thread, COMPUTING apart, and writes them: dimensions 2 g and 2 g + 1 of two rows
// each. `BATCH` work items are asked for together, of those that there are.
template <int TIMES, int BATCH>
DEVICE void merge_fours(const Entries& stored, int first_entry, int count, int at, int end, const Part& part, OUT_TYPE::Storage* out,
                        float value_scale, float quanta) {
  struct Merged {
    float all[4] = {0.0f, 0.0f, 0.0f, 0.0f}, base[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
  } merged[TIMES];
#pragma unroll 1
  for (int first = 0; first < count; first += BATCH) {
    float4 x[TIMES][BATCH], its[TIMES][BATCH];  // base and total of two rows
#pragma unroll
    for (int time = 0; time < TIMES; ++time) {
      const int four = min(at + time * COMPUTING, end - 1);
      const float4* sums = stored.sums(first_entry) + four;
      const float2* states = stored.states(first_entry) + row_of_four(four);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {  // what is not there is one that is: a load in a branch would wait for all others
        const int entry = min(first + i, count - 1);
        x[time][i] = load_four(sums + entry * FOURS), its[time][i] = load_four(states + entry * ROWS);
      }
    }
#pragma unroll
    for (int time = 0; time < TIMES; ++time) {
      Merged& own = merged[time];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        float4 state = its[time][i];
        const float4 y = x[time][i];
        const bool is_there = first + i < count;  // what is not there leaves all as it is
        if (!is_there) state = make_float4(minus_infinity(), 0.0f, minus_infinity(), 0.0f);
        const Factors by[2] = {Factors(own.base[0], state.x), Factors(own.base[1], state.z)};
        const float next[4] = {joined(own.all[0], by[0].left, y.x, by[0].right), joined(own.all[1], by[1].left, y.y, by[1].right),
                               joined(own.all[2], by[0].left, y.z, by[0].right), joined(own.all[3], by[1].left, y.w, by[1].right)};
        own.total[0] = joined(own.total[0], by[0].left, state.y, by[0].right);
        own.total[1] = joined(own.total[1], by[1].left, state.w, by[1].right);
        own.base[0] = by[0].base, own.base[1] = by[1].base;
#pragma unroll
        for (int k = 0; k < 4; ++k) own.all[k] = is_there ? next[k] : own.all[k];
      }
    }
  }
#pragma unroll
  for (int time = 0; time < TIMES; ++time) {
    const int four = at + time * COMPUTING;
    const Merged& own = merged[time];
    if (four >= end) continue;
    write_four(out, part, four, own.all, __fdiv_rn(value_scale, own.total[0]), __fdiv_rn(value_scale, own.total[1]), quanta);
  }
}

// By how much what was merged before, and a stored work item, are multiplied, of each row, and the work item's sum of weights: in shared
// memory that keys and values have left. Where a thread has several fours it takes less to find these once for a row than for each.
struct StoredFactors {
  static constexpr int STEP = ROWS * 2 + 4, BYTES = (STEP + ROWS) * 4;  // from one work item to the next: numbers; of a work item
  static constexpr int ROOM = FACTOR_ROOM;
  static_assert(ROOM * BYTES <= 2 * SLOTS * TILE_BYTES, "room for them");
  float* factors;

  DEVICE explicit StoredFactors(u8* memory) : factors((float*)(memory + Places::KEYS_AT)) {}
  DEVICE float2& of(int entry, int row) const { return *(float2*)&factors[entry * STEP + 2 * row]; }
  DEVICE const float4& of_two(int entry, int row) const { return *(const float4*)&of(entry, row); }  // of the next row, too
  DEVICE float& total(int entry, int row) const { return factors[ROOM * STEP + entry * ROWS + row]; }

  // Of work items [0, count), up to ROOM, by all who compute: a warp has rows, and its lanes have work items. `base`: what was merged
  // before has, of these rows.
  static constexpr int TIMES = ROWS / 8;
  DEVICE void find(const float2* states, int count, float (&base)[TIMES]) const {
    const int warp = (int(threadIdx.x) - THREADS) / 32, lane = lane_id();
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
      const int entry = first + lane;
      float2 x[TIMES];
      float top[TIMES];
#pragma unroll
      for (int i = 0; i < TIMES; ++i) x[i] = load_two(states + min(entry, count - 1) * ROWS + 8 * i + warp);
#pragma unroll
      for (int i = 0; i < TIMES; ++i) top[i] = x[i].x;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int i = 0; i < TIMES; ++i) top[i] = fmaxf(top[i], __shfl_up_sync(~0u, top[i], lanes));  // the own one where there is none
      }
#pragma unroll
      for (int i = 0; i < TIMES; ++i) {
        const float left = __shfl_up_sync(~0u, top[i], 1);
        const Factors by(lane == 0 ? base[i] : fmaxf(base[i], left), x[i].x);
        if (entry < count) of(entry, 8 * i + warp) = make_float2(by.left, by.right), total(entry, 8 * i + warp) = x[i].y;
        base[i] = fmaxf(base[i], __shfl_sync(~0u, top[i], 31));
      }
    }
  }
  // A row's sum of weights, of those merged before and these.
  DEVICE float merge_totals(int count, int row, float its_total) const {
#pragma unroll 4
    for (int i = 0; i < count; ++i) its_total = joined(its_total, of(i, row).x, total(i, row), of(i, row).y);
    return its_total;
  }
};

// What thread block `nth` of `sharing` takes of a context's `count` stored work items: it merges and writes them.
DEVICE void merge_stored(u8* memory, Columns& columns, const Entries& stored, int first_entry, int count, int nth, int sharing,
                         const Part& part, OUT_TYPE::Storage* out, float value_scale, float quanta) {
  constexpr int FEW = 3, ROOM = StoredFactors::ROOM;
  const int each = (FOURS + sharing - 1) / sharing, begin = nth * each, end = min(begin + each, FOURS), thread = int(threadIdx.x) - THREADS;
  if (count <= FEW || each <= COMPUTING) {  // what follows takes longer to begin
    constexpr int TIMES = 4;
#pragma unroll 1
    for (int at = begin + thread; at < end; at += TIMES * COMPUTING) {
      if (count <= FEW) {
        merge_fours<TIMES, FEW>(stored, first_entry, count, at, end, part, out, value_scale, quanta);
      } else {
        merge_fours<1, BATCH>(stored, first_entry, count, at, end, part, out, value_scale, quanta);
      }
    }
    return;
  }
  const StoredFactors by(memory);
  const int own_row = thread - (COMPUTING - ROWS);  // by threads that often have nothing else
#pragma unroll 1
  for (int from = begin; from < end; from += COMPUTING) {
    const int four = min(from + thread, end - 1), row = row_of_four(four);
    float all[4] = {0.0f, 0.0f, 0.0f, 0.0f}, base[StoredFactors::TIMES], total = 0.0f;
#pragma unroll
    for (int i = 0; i < StoredFactors::TIMES; ++i) base[i] = minus_infinity();
#pragma unroll 1
    for (int start = 0; start < count; start += ROOM) {
      const int its_count = min(count - start, ROOM);
#pragma unroll 1
      for (int first = 0; first < its_count; first += BATCH) {
        float4 x[BATCH];
        const float4* sums = stored.sums(first_entry + start + first) + four;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) x[i] = load_four_if(first + i < its_count, sums + i * FOURS);
        if (first == 0 && (from == begin || count > ROOM)) {  // meanwhile
          if (from > begin || start > 0) meet_computing();
          by.find(stored.states(first_entry + start), its_count, base);
          meet_computing();
          if (own_row >= 0) total = by.merge_totals(its_count, own_row, total);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          if (first + i >= its_count) break;
          const float4 factors = by.of_two(first + i, row);
          all[0] = joined(all[0], factors.x, x[i].x, factors.y), all[1] = joined(all[1], factors.z, x[i].y, factors.w);
          all[2] = joined(all[2], factors.x, x[i].z, factors.y), all[3] = joined(all[3], factors.z, x[i].w, factors.w);
        }
      }
    }
    if (from == begin) {
      if (own_row >= 0) columns.all_total[own_row] = __fdiv_rn(value_scale, total);
      meet_computing();
    }
    if (from + thread < end) write_four(out, part, four, all, columns.all_total[row], columns.all_total[row + 1], quanta);
  }
}

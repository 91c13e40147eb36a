// The warpgroups of long_batch.cu: they attend to tiles, and merge or store every work item (`unit`).
//
// A tile's logits pass through shared memory to one thread per row, which computes the softmax weights; so maximum and
// sum of a row need no other thread. While one warpgroup does that, the others multiply.
#pragma once

#include "ops/paged_attention/long_batch/tiles.cuh"

// The state of a work item in the thread of its row, and how a tile is added to it. Which sums are added in which order
// is that of shared/unit_state.cuh: of eight keys two for each of four lanes.
struct RowState {
  float largest, total;

  DEVICE void clear() { largest = minus_infinity(), total = 0.0f; }
  // Replaces logits by weights; the factor of earlier sums. Keys behind `last` are not visible.
  DEVICE float soften(u32 logits, int row, int last, float scale) {
    float x[KEYS];
#pragma unroll
    for (int chunk = 0; chunk < KEYS / 4; ++chunk) {
      const float4 four = load_four(logits + logit_place(row, chunk));
      x[4 * chunk] = four.x, x[4 * chunk + 1] = four.y;
      x[4 * chunk + 2] = four.z, x[4 * chunk + 3] = four.w;
    }
    if (last < KEYS - 1) {
#pragma unroll
      for (int key = 0; key < KEYS; ++key) x[key] = key <= last ? x[key] : minus_infinity();
    }
    float tops[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) tops[i] = x[i];
#pragma unroll
    for (int key = 4; key < KEYS; ++key) tops[key % 4] = fmaxf(tops[key % 4], x[key]);
    float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    top = fmaxf(largest, __fmul_rn(top, scale));
    const float base = finite(top), fade = exp2(__fsub_rn(largest, base));
    largest = top;
    float sums[4];
    __syncwarp();  // all eight rows of an atom have been read
#pragma unroll
    for (int part = 0; part < KEYS / 8; ++part) {
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = exp2(__fmaf_rn(x[8 * part + 2 * i], scale, -base));
        const float b = exp2(__fmaf_rn(x[8 * part + 2 * i + 1], scale, -base));
        sums[i] = __fadd_rn(part == 0 ? a : __fadd_rn(sums[i], a), b);
        pairs[i] = Inner::pack_pair(a, b);
      }
      store_shared(logits + weight_place(row, part), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    const float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    total = __fmaf_rn(total, fade, sum);
    return fade;
  }
};

typedef float Sums[2][SUMS];

DEVICE float4 four_of(const Sums& x, int b, int j) {
  const float* its = &x[b][4 * j];
  return {its[0], its[1], its[2], its[3]};
}

// By how much the sums so far of a row are multiplied, and those of the next work item.
struct Factors {
  float left, right;
};
// Appends a work item to what has been merged to the left of it.
DEVICE float append_sum(float merged, float x, Factors by) {
  return __fmaf_rn(merged, by.left, __fmul_rn(x, by.right));
}
DEVICE float4 append_four(const float4& merged, const float4& x, Factors even, Factors odd) {
  return {append_sum(merged.x, x.x, even), append_sum(merged.y, x.y, odd),
          append_sum(merged.z, x.z, even), append_sum(merged.w, x.w, odd)};
}
DEVICE Factors append_state(float2& merged, float2 x) {
  const float top = fmaxf(merged.x, x.x), base = finite(top);
  const Factors by = {exp2(__fsub_rn(merged.x, base)), exp2(__fsub_rn(x.x, base))};
  merged = {top, __fmaf_rn(merged.y, by.left, __fmul_rn(x.y, by.right))};
  return by;
}

// Where work items of a block of rows are stored that others merge: those behind the first share's, which is the first
// one, as its thread block has merged it.
struct Entries {
  float4* sums;    // [entries, two halves of the head, ROWS / 8, WARPGROUP]
  float2* states;  // [entries, ROWS]: largest, total
  int first_unit;  // of the second entry

  DEVICE int of(int unit) const { return unit - first_unit + 1; }
  DEVICE float4* four(int entry, int b, int j, int thread) const {
    return sums + (((long long)entry * 2 + b) * (ROWS / 8) + j) * WARPGROUP + thread;
  }
  DEVICE float2* state(int entry, int row) const { return states + (long long)entry * ROWS + row; }
};

// What a thread block computes: some tokens of one request, for one KV head.
struct Part {
  int head, request, first_token, num_rows;  // the first of the step's tokens
  Entries entries;
  bool merges;  // the context's beginning, in shared memory
};

// A warpgroup, and what becomes of its work items.
struct Stream {
  const Shared& shared;
  const Part& part;
  int nth, thread, place;

  DEVICE Stream(const Shared& shared_, const Part& part_)
      : shared(shared_),
        part(part_),
        nth(threadIdx.x / WARPGROUP),
        thread(threadIdx.x % WARPGROUP),
        place(own_place()) {}
  DEVICE bool has_row() const { return place < part.num_rows; }
  DEVICE bool has_rows() const { return place / 32 * 32 < part.num_rows; }  // the warp
  DEVICE int row() const { return min(place, ROWS - 1); }  // of several threads the last one

  DEVICE void store(const Sums& sums, const RowState& row, int unit) const {
    const int entry = part.entries.of(unit);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      if (8 * j >= part.num_rows) break;
#pragma unroll
      for (int b = 0; b < 2; ++b) __stcg(part.entries.four(entry, b, j, thread), four_of(sums, b, j));
    }
    if (has_row()) {
      __stcg(part.entries.state(entry, place), make_float2(row.largest, row.total));
    }
  }
  // In order, and by one warpgroup at a time; factors go through where its weights were.
  DEVICE void merge(const Sums& sums, const RowState& row, int unit) const {
    const int round = unit / STREAMS;
    if (unit > 0) barrier_wait(shared.turn(nth), (nth > 0 ? round : round - 1) & 1);
    meet(nth);
    const u32 factors = shared.logits(nth);
    if (has_row()) {
      float2 merged = {minus_infinity(), 0.0f};
      if (unit > 0) merged = load_pair_of(shared.state(place));
      const Factors by = append_state(merged, {row.largest, row.total});
      store_pair_of(shared.state(place), merged);
      store_pair_of(factors + place * 8, {by.left, by.right});
    }
    meet(nth);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      if (8 * j >= part.num_rows) break;
      const float4 by = load_four(factors + (8 * j + thread % 4 * 2) * 8);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const u32 at = shared.merged(b, j, thread);
        float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
        if (unit > 0) merged = load_four(at);
        store_four(at, append_four(merged, four_of(sums, b, j), {by.x, by.y}, {by.z, by.w}));
      }
    }
    barrier_arrive(shared.turn(nth + 1 == STREAMS ? 0 : nth + 1));
  }
  DEVICE void finish(const Sums& sums, const RowState& row, int unit) const {
    if (part.merges) {
      merge(sums, row, unit);
    } else {
      store(sums, row, unit);
    }
  }
};

DEVICE void fade_sums(Sums& sums, const Shared& shared, int stream) {
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
    const float2 fade = load_pair_of(shared.fade(stream, 8 * j + lane_id() % 4 * 2));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = sums[b][4 * j + i];
        x = __fmul_rn(x, i % 2 == 0 ? fade.x : fade.y);
      }
    }
  }
}

// Values are loaded before weights are made, and the next tile's keys before all weights are, where threads have registers
// for them.
constexpr bool LOADS_FIRST = STREAMS == 2;

// Attends to the warpgroup's tiles, which `copier` has begun to copy. From full_tiles on a row sees keys up to last_key
// only.
DEVICE void attend_share(const Stream& its, const Share& share, TileCopier& copier, int full_tiles,
                         int last_key, float scale, Sums& sums, RowState& row) {
  const Shared& shared = its.shared;
  const int nth = its.nth;
  Walk at;
  at.start(share.first_unit + nth);
  if (at.tile >= share.end) return;
  const u32 logits = shared.logits(nth);
  float s[SUMS];
  wait_for_copies<SLOTS - 1>();
  meet(nth);
  {
    u32 keys[STEPS][4];
    load_keys(keys, shared.keys(nth, 0));
    start_logits(s, keys, shared.queries());
  }
  product_wait<0>();
  keep_order(s);
  bool is_first = true;  // tile of its work item
  row.clear();
#pragma unroll 1
  for (int slot = 0;;) {
    store_logits(logits, s);
    if (LOADS_FIRST) wait_for_copies<SLOTS - 2>();
    meet(nth);
    copier.copy_next(shared);
    u32 values[2][BLOCKS][4];
    if (LOADS_FIRST) load_values(values, shared.values(nth, slot));
    if (its.has_rows()) {
      const int last = at.tile < full_tiles ? KEYS : last_key - at.tile * KEYS;
      const float fade = row.soften(logits, its.row(), last, scale);
      store_float(shared.fade(nth, its.row()), fade);
    }
    shared_fence();  // weights are written by threads, read by tensor cores
    const int next = slot + 1 == SLOTS ? 0 : slot + 1;
    u32 keys[STEPS][4];  // of no tile behind the last one
    if (LOADS_FIRST) load_keys(keys, shared.keys(nth, next));
    if (!LOADS_FIRST) wait_for_copies<SLOTS - 1>();
    meet(nth);
    const int unit = at.unit;
    {
      if (!LOADS_FIRST) load_values(values, shared.values(nth, slot));
      if (!is_first) fade_sums(sums, shared, nth);
      start_values(sums, values, logits, !is_first);
      at.next();
      slot = next;
      if (!LOADS_FIRST) load_keys(keys, shared.keys(nth, slot));
      start_logits(s, keys, shared.queries());
      product_wait<0>();
      keep_order(s), keep_order(sums[0]), keep_order(sums[1]);
    }
    const bool is_last = at.tile >= share.end;
    is_first = at.unit != unit;
    if (is_first || is_last) {
      its.finish(sums, row, unit);
      row.clear();
    }
    if (is_last) return;
    meet(nth);  // weights and factors have been read
  }
}

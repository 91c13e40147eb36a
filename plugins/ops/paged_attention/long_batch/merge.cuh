// How the thread blocks of long_batch.cu that share a context merge what they have stored (Entries), and how rows are
// written. A warp takes 64 dimensions b, rows 8 j to 8 j + 7 and a quarter of the dimensions, and goes through all entries
// from left to right.
#pragma once

#include "ops/paged_attention/long_batch/units.cuh"
#include "ops/paged_attention/shared/meeting.cuh"
#include "ops/paged_attention/shared/output.cuh"

constexpr int THREADS = STREAMS * WARPGROUP, WARPS = THREADS / 32;
constexpr int AHEAD = 16;  // entries on their way to a thread

// Where and how a block of rows is written.
struct Output {
  OUT_TYPE::Storage* out;
  float value_scale, quanta;

  // Four sums of a thread, and the totals of its two rows.
  DEVICE void store(const Part& part, int dimension, int j, const float4& x, float even,
                    float odd) const {
    write(part, dimension, 8 * j + lane_id() % 4 * 2, x.x, x.z, even);
    write(part, dimension, 8 * j + lane_id() % 4 * 2 + 1, x.y, x.w, odd);
  }
  DEVICE void write(const Part& part, int dimension, int row, float low, float high,
                    float total) const {
    if (row >= part.num_rows) return;
    const long long token = part.first_token + row / GROUP;
    OUT_TYPE::Storage* to =
        out + (token * HEADS + part.head) * (GROUP * SIZE) + row % GROUP * SIZE + dimension;
    store_pair(to, finish_pair(low, high, __fdiv_rn(value_scale, total), quanta));
  }
};

// Calls use(b, j) for what a warpgroup has of the rows.
template <class Use>
DEVICE void each_four(const Part& part, const Use& use) {
#pragma unroll 1
  for (int j = threadIdx.x / WARPGROUP; 8 * j < part.num_rows; j += STREAMS) {
#pragma unroll
    for (int b = 0; b < 2; ++b) use(b, j);
  }
}

// Writes the rows of a context that the thread block has merged alone.
DEVICE void write_merged(const Shared& shared, const Part& part, const Output& output) {
  each_four(part, [&](int b, int j) {
    const int row = 8 * j + lane_id() % 4 * 2;
    output.store(part, own_dimension(b), j,
                 load_four(shared.merged(b, j, threadIdx.x % WARPGROUP)),
                 load_pair_of(shared.state(row)).y, load_pair_of(shared.state(row + 1)).y);
  });
}

// Stores what the first thread block of a context has merged, if anything, as the first entry.
DEVICE void store_merged(const Shared& shared, const Part& part, bool is_empty) {
  const int thread = threadIdx.x % WARPGROUP;
  each_four(part, [&](int b, int j) {
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!is_empty) x = load_four(shared.merged(b, j, thread));
    __stcg(part.entries.four(0, b, j, thread), x);
  });
  if (int(threadIdx.x) < part.num_rows) {
    float2 state = {minus_infinity(), 0.0f};
    if (!is_empty) state = load_pair_of(shared.state(threadIdx.x));
    __stcg(part.entries.state(0, threadIdx.x), state);
  }
}

// Waits for all thread blocks of a context; what they stored may be read.
DEVICE void meet_shares(int* counter, int count) {
  __syncthreads();
  if (threadIdx.x == 0) wait_for_others(counter, count);
  __syncthreads();
}

DEVICE void load_entry(float2& x, const float2* from) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from));
}
DEVICE void load_entry(float4& x, const float4* from) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from));
}

// The factors of four entries and eight rows, one of each a lane.
struct EntryFactors {
  float so_far = minus_infinity();  // the largest of a row before them
  float left, right, total;         // total: of the entry, multiplied

  DEVICE void find(float2 state) {
    float top = state.x;
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      const float other = __shfl_up_sync(~0u, top, lanes);
      if (lane_id() >= lanes) top = fmaxf(top, other);
    }
    top = fmaxf(so_far, top);
    float before = __shfl_up_sync(~0u, top, 8);
    if (lane_id() < 8) before = so_far;
    so_far = __shfl_sync(~0u, top, 24 + lane_id() % 8);
    const float base = finite(top);
    left = exp2(__fsub_rn(before, base)), right = exp2(__fsub_rn(state.x, base));
    total = __fmul_rn(state.y, right);
  }
  DEVICE Factors of(int nth, int row) const {
    return {__shfl_sync(~0u, left, 8 * nth + row), __shfl_sync(~0u, right, 8 * nth + row)};
  }
  DEVICE float append(float merged, Factors by, int nth, int row) const {
    return __fmaf_rn(merged, by.left, __shfl_sync(~0u, total, 8 * nth + row));
  }
};

// Merges and writes what thread block `nth` of `num_shares` takes of `count` entries.
DEVICE void merge_entries(const Part& part, int count, int nth, int num_shares,
                          const Output& output) {
  const int lane = lane_id(), row = lane % 4 * 2;
#pragma unroll 1
  // So that own_dimension is right, a warp takes the quarters of its place in the warpgroup.
  for (int i = nth * STREAMS + threadIdx.x / WARPGROUP;; i += num_shares * STREAMS) {
    const int b = i % 2, j = i / 2;
    if (8 * j >= part.num_rows) break;
    float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
    float even = 0.0f, odd = 0.0f;
    EntryFactors factors;
#pragma unroll 1
    for (int first = 0; first < count; first += AHEAD) {
      float4 x[AHEAD];
      float2 states[AHEAD / 4];
#pragma unroll
      for (int k = 0; k < AHEAD / 4; ++k) {
        const int entry = first + 4 * k + lane / 8;
        states[k] = {minus_infinity(), 0.0f};
        if (entry < count) load_entry(states[k], part.entries.state(entry, 8 * j + lane % 8));
      }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        const int entry = min(first + k, count - 1);
        load_entry(x[k], part.entries.four(entry, b, j, threadIdx.x % WARPGROUP));
      }
#pragma unroll
      for (int k = 0; k < AHEAD / 4; ++k) {
        factors.find(states[k]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Factors left = factors.of(e, row), right = factors.of(e, row + 1);
          const float even_total = factors.append(even, left, e, row);
          const float odd_total = factors.append(odd, right, e, row + 1);
          if (first + 4 * k + e >= count) continue;
          sums = append_four(sums, x[4 * k + e], left, right);
          even = even_total, odd = odd_total;
        }
      }
    }
    output.store(part, own_dimension(b), j, sums, even, odd);
  }
}

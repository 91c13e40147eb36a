// How generation.cu sends work items (`unit`) to the thread blocks that own their rows, merges them, and
// writes the output.
#pragma once

#include "backends/cuda/sm90/cluster.cuh"
#include "ops/paged_attention/generation/units.cuh"
#include "ops/paged_attention/shared/meeting.cuh"
#include "ops/paged_attention/shared/output.cuh"
#include "ops/paged_attention/shared/unit_state.cuh"

// The two rows of a product that a thread holds.
DEVICE int own_row(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

constexpr int CHUNK_BYTES = 256 + 8;  // 64 dimensions and the row's state

// How the work items of a block of rows are transferred; the same for every thread, and kept in shared
// memory to save registers while tiles are computed. A chunk is 64 dimensions of a row, as
// 16 records of what one thread holds: dimensions 16 i + 2 j, the next one, and those 8 further, for
// record 4 i + j. Thread block c / slots owns chunk c.
struct Handover {
  int units, chunks;
  int slots;       // the most chunks that one thread block owns
  int reciprocal;  // of slots, in 65536ths: exact for all chunks
  int is_shared;   // else through global memory

  DEVICE void plan(int units_, int num_rows) {
    units = units_, chunks = num_rows * HALVES;
    slots = max((chunks + SPLITS - 1) / SPLITS, 1);  // the parameters may have any value before the wait
    reciprocal = 65536 / slots + 1;
    is_shared = CLUSTERED && units * slots * CHUNK_BYTES <= PARTS_BYTES;
  }
  DEVICE Handover reread() const volatile {
    return {units, chunks, slots, reciprocal, is_shared};
  }
  DEVICE int owned(int rank) const { return max(min(chunks - rank * slots, slots), 0); }
};

struct Parts {
  Handover plan;
  u32 shared, barrier;  // records [units, slots], then states [units, slots]
  float* partial;       // the same in global memory, [units, chunks]
  long long stride;     // of a block of rows

  DEVICE float4* records() const {
    return (float4*)(partial + (blockIdx.z * gridDim.y + blockIdx.y) * stride);
  }
  DEVICE float2* states() const { return (float2*)(records() + plan.units * plan.chunks * 16); }

  // Calls use(chunk, half, r) for each chunk of which the thread has records.
  template <class Use>
  DEVICE void each_chunk(const Use& use) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int row = own_row(r);
      hold_back(row);
      if (row * HALVES >= plan.chunks) continue;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) use(row * HALVES + half, half, r);
    }
  }
  DEVICE void send(const State& state, int unit) const {
    const int lane = threadIdx.x % 4;
    if (plan.is_shared) {
      each_chunk([&](int chunk, int half, int r) {
        const int owner = chunk * plan.reciprocal >> 16;
        const int at = unit * plan.slots + chunk - owner * plan.slots;
        const u32 to = remote_address(shared + at * 256 + lane * 16, owner);
        const u32 arrived = remote_address(barrier, owner);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &state.acc[32 * half + 8 * i + 2 * r];
          store_remote(to + 64 * i, arrived, x[0], x[1], x[4], x[5]);
        }
        if (lane == 0) {
          store_remote_pair(
              remote_address(shared + plan.units * plan.slots * 256 + at * 8, owner), arrived,
              state.largest[r], state.total[r]);
        }
      });
    } else {
      each_chunk([&](int chunk, int half, int r) {
        const int at = unit * plan.chunks + chunk;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &state.acc[32 * half + 8 * i + 2 * r];
          __stcg(records() + at * 16 + 4 * i + lane, make_float4(x[0], x[1], x[4], x[5]));
        }
        if (lane == 0) __stcg(states() + at, make_float2(state.largest[r], state.total[r]));
      });
    }
  }
};

// Waits for the thread blocks that share a block of rows; all of them run at once.
DEVICE void meet_all(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) wait_for_others(counter, SPLITS);
  __syncthreads();
}

// The last one to arrive leaves the counter at zero.
DEVICE void leave_all(int* counter) {
  if (threadIdx.x == 0) leave_others(counter, SPLITS);
}

// Reads global memory, bypassing L1.
DEVICE void load_part(float2& state, float4& part, const float2* s, const float4* p) {
  asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(state.x), "=f"(state.y) : "l"(s));
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
               : "l"(p));
}

struct Merged {
  float largest, total;
  float acc[4];

  // Merges COUNT work items from left to right; everything except the sums is computed before them.
  static constexpr int COUNT = 8;
  DEVICE void append(const float2* state, const float4* part) {
    float left[COUNT], right[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const float top = fmaxf(largest, state[j].x), base = finite(top);
      left[j] = exp2(__fsub_rn(largest, base)), right[j] = exp2(__fsub_rn(state[j].x, base));
      largest = top;
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      total = __fmaf_rn(total, left[j], __fmul_rn(state[j].y, right[j]));
      acc[0] = __fmaf_rn(acc[0], left[j], __fmul_rn(part[j].x, right[j]));
      acc[1] = __fmaf_rn(acc[1], left[j], __fmul_rn(part[j].y, right[j]));
      acc[2] = __fmaf_rn(acc[2], left[j], __fmul_rn(part[j].z, right[j]));
      acc[3] = __fmaf_rn(acc[3], left[j], __fmul_rn(part[j].w, right[j]));
    }
  }
};

// Merges one record of `units` work items, `stride` chunks apart.
template <bool IS_SHARED>
DEVICE Merged merge_units(const float2* states, const float4* records, int stride, int units) {
  Merged merged = {minus_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
  constexpr int WIDE = SIZE == 128 && !CLUSTERED && !IS_SHARED;  // registers allow for more
  constexpr int LOADED = (WIDE ? 2 : 1) * Merged::COUNT;         // work items at once
  for (int unit = 0; unit < units; unit += LOADED) {
    float2 state[LOADED];
    float4 part[LOADED];
#pragma unroll
    for (int j = 0; j < LOADED; ++j) {
      const int at = (unit + j) * stride;
      state[j] = {minus_infinity(), 0.0f}, part[j] = {0.0f, 0.0f, 0.0f, 0.0f};  // no change
      if (unit + j >= units) continue;
      if (IS_SHARED) {
        state[j] = states[at], part[j] = records[at * 16];
      } else {
        load_part(state[j], part[j], states + at, records + at * 16);
      }
    }
#pragma unroll
    for (int j = 0; j < LOADED; j += Merged::COUNT) merged.append(state + j, part + j);
  }
  return merged;
}

// ---- the output ----

struct Output {
  OUT_TYPE::Storage* out;
  float value_scale, quanta;

  DEVICE void store(const Merged& m, long long at) const {
    const float factor = __fdiv_rn(value_scale, m.total);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_pair(out + at + 8 * i, finish_pair(m.acc[2 * i], m.acc[2 * i + 1], factor, quanta));
    }
  }
};

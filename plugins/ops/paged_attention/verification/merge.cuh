// Where the thread blocks of verification.cu store work items (`unit`), how they merge them, and how they write the output.
#pragma once

#include "backends/cuda/sm90/cluster.cuh"
#include "ops/paged_attention/shared/output.cuh"
#include "ops/paged_attention/verification/tiles.cuh"

constexpr int ROW_BYTES = SIZE * 4;
constexpr int WIDTH = SIZE / 32;        // dimensions per lane
DEVICE constexpr int power_of_two(int most) {  // the largest up to `most`
  return most < 2 ? 1 : 2 * power_of_two(most / 2);
}
constexpr int MERGERS =  // warps
    ROWS % 3 == 0 && WARPS >= 12 ? 12 : power_of_two(WARPS < ROWS ? WARPS : ROWS);
constexpr int OWN_ROWS = ROWS / MERGERS;                            // of each
constexpr int GROUP_UNITS = UNITS > 8 ? UNITS / 2 : UNITS;  // work items that are merged at once
constexpr int STATES_BYTES = UNITS * ROWS * 8, MESSAGE_BYTES = ROWS * (ROW_BYTES + 8);
static_assert(ROWS % MERGERS == 0, "every merging warp has as many rows");
static_assert(UNITS % GROUP_UNITS == 0, "whole groups");
static_assert(ROWS * ROW_BYTES <= 2 * TILE_BYTES, "a unit lies where its tiles were");

struct Shared {
  u32 tiles;    // keys and values of each work item
  u32 states;   // largest and total of each work item and row, later their factors in the merge
  u32 message;  // the state received from another block: sums, then largest and total
  u32 queries, barrier;
  u32 window;               // of a tree (tree/paths.cuh): keys, then values
  u8 (*rows)[WINDOW_KEYS];  // where each of its tokens has them there
  Gathered* gathered;

  static constexpr int BEFORE_ROWS = UNITS * 2 * TILE_BYTES + TREE * 2 * WINDOW_BYTES +
                                     2 * STATES_BYTES + MESSAGE_BYTES + ROWS * SIZE * 2;
  static constexpr int BYTES = BEFORE_ROWS + TREE * (ROWS / GROUP) * WINDOW_KEYS + 16;
  DEVICE explicit Shared(u8* memory) {
    tiles = shared_address(memory);
    window = tiles + UNITS * 2 * TILE_BYTES;
    states = window + TREE * 2 * WINDOW_BYTES;
    message = states + 2 * STATES_BYTES;
    queries = message + MESSAGE_BYTES;
    rows = (u8(*)[WINDOW_KEYS])(memory + BEFORE_ROWS);
    barrier = tiles + BYTES - 16;
    gathered = (Gathered*)(memory + BYTES);
  }
  // Sums of a row of a work item.
  DEVICE u32 sums(int nth, int row) const { return tiles + 2 * nth * TILE_BYTES + row * ROW_BYTES; }
  DEVICE u32 state(int nth, int row) const { return states + (nth * ROWS + row) * 8; }
  DEVICE u32 factors(int nth, int row) const { return state(nth, row) + STATES_BYTES; }
};
static_assert(Shared::BYTES + sizeof(Gathered) <= SHARED_BYTES, "room for all of it");

template <int N>
struct Floats {
  float x[N];
};
typedef Floats<2 * OWN_ROWS> Pairs;  // largest and total, or factors, of a warp's rows
DEVICE void store_float(u32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
DEVICE void store_floats(u32 to, const Floats<2>& y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(y.x[0]), "f"(y.x[1]) : "memory");
}
DEVICE void load_floats(Floats<2>& y, u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(y.x[0]), "=f"(y.x[1])
               : "r"(from)
               : "memory");
}
DEVICE void load_floats(Floats<4>& y, u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(y.x[0]), "=f"(y.x[1]), "=f"(y.x[2]), "=f"(y.x[3])
               : "r"(from)
               : "memory");
}
template <int N>
DEVICE void load_floats(Floats<N>& y, u32 from) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    Floats<2> two;
    load_floats(two, from + 8 * i);
    y.x[2 * i] = two.x[0], y.x[2 * i + 1] = two.x[1];
  }
}
DEVICE float load_float(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
// Stores to another block's shared memory, counted by that block's barrier.
DEVICE void send_floats(u32 to, u32 barrier, const Floats<2>& y) {
  store_remote_pair(to, barrier, y.x[0], y.x[1]);
}
DEVICE void send_floats(u32 to, u32 barrier, const Floats<4>& y) {
  store_remote(to, barrier, y.x[0], y.x[1], y.x[2], y.x[3]);
}

// The address of byte `offset` of a row, such that rows that are stored at once fall on all banks.
DEVICE int turned(int row, int offset) {
  const int turn = IS_BYTE ? row / 2 % 2 * 64 : row / 2 % 4 * 32;
  return offset / 128 * 128 + (offset % 128 ^ turn);
}

// Stores a work item, C blocks of columns from `first` on.
template <int C>
DEVICE void store_unit(const Shared& shared, const StateOf<STEPS, C>& state, int nth,
                       int first = 0) {
  const int lane = thread_from_here() % 32;
#pragma unroll
  for (int n = 0; n < C; ++n) {
    const float other = __shfl_xor_sync(~0u, state.total[n], 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * (first + n) + lane % 4 * 2 + c;
      if (lane < 4) {
        const float total = c == 0 ? state.total[n] : other;
        store_floats(shared.state(nth, row), {state.largest[n][c], total});
      }
      const u32 to = shared.sums(nth, row) + lane / 4 * (IS_BYTE ? 8 : 4);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const float low = state.sums[n][i][c], high = state.sums[n][i][c + 2];
        if (IS_BYTE) {  // adjacent dimensions
          store_floats(to + turned(row, i * 64), {low, high});
        } else {  // or 8 apart
          store_float(to + turned(row, i * 64), low);
          store_float(to + turned(row, i * 64 + 32), high);
        }
      }
    }
  }
}

struct Output {
  OUT_TYPE::Storage* out;
  float value_scale, quanta;
};

// What a work item contributes to a warp's rows, for a lane's dimensions.
struct Part {
  Pairs states;  // largest, total
  Floats<WIDTH> sums[OWN_ROWS];

  DEVICE void load(const Shared& shared, int nth, int row, int lane) {
    load_floats(states, shared.state(nth, row));
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      load_floats(sums[i], shared.sums(nth, row + i) + turned(row + i, lane * (WIDTH * 4)));
    }
  }
};

// What a thread has merged: WIDTH dimensions of each of its warp's rows.
struct Merged {
  Floats<2> state[OWN_ROWS];  // largest, total
  Floats<WIDTH> sums[OWN_ROWS];
  int lane, row;  // its first row

  DEVICE Merged() {
    const int thread = thread_from_here();
    lane = thread % 32, row = thread / 32 * OWN_ROWS;
  }
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      state[i] = {minus_infinity(), 0.0f};
#pragma unroll
      for (int d = 0; d < WIDTH; ++d) sums[i].x[d] = 0.0f;
    }
  }
  // Merges the block's work items from left to right, after the state received from another block. Everything
  // that does not need the other block is done before the wait for it. Each lane computes the factors of one
  // work item and row.
  DEVICE void append(const Shared& shared, int units, bool has_before, u32 parity) {
    constexpr int SPAN = power_of_two(2 * UNITS - 1);  // lanes for the work items of a row
    static_assert(OWN_ROWS * SPAN <= 32, "a lane for each factor");
    const int nth = lane % SPAN, own = lane / SPAN % OWN_ROWS;
    Floats<2> unit = {minus_infinity(), 0.0f};
    if (nth < units) load_floats(unit, shared.state(nth, row + own));
    float so_far = unit.x[0];  // the largest of this work item and those before it
#pragma unroll
    for (int d = 1; d < UNITS; d *= 2) {
      const float other = __shfl_up_sync(~0u, so_far, d, SPAN);
      if (nth >= d) so_far = fmaxf(so_far, other);
    }
    float before = __shfl_up_sync(~0u, so_far, 1, SPAN);
    if (nth == 0) before = minus_infinity();
    Part parts[GROUP_UNITS];
#pragma unroll
    for (int j = 0; j < GROUP_UNITS; ++j) parts[j].load(shared, j, row, lane);
    if (has_before) {
      receive(shared, parity);
    } else {
      clear();
    }
    float merged = state[0].x[0];
#pragma unroll
    for (int i = 1; i < OWN_ROWS; ++i) merged = own == i ? state[i].x[0] : merged;
    const float top = fmaxf(merged, so_far), base = finite(top);
    const float right = exp2(__fsub_rn(unit.x[0], base));
    const float left = exp2(__fsub_rn(fmaxf(merged, before), base));
    if (nth < UNITS) store_floats(shared.factors(nth, row + own), {left, right});
    __syncwarp();
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      state[i].x[0] = __shfl_sync(~0u, top, i * SPAN + UNITS - 1);
    }
#pragma unroll
    for (int first = 0; first < UNITS; first += GROUP_UNITS) {
      if (first >= units) break;
#pragma unroll
      for (int j = 0; j < GROUP_UNITS; ++j) {
        if (first > 0) parts[j].load(shared, first + j, row, lane);
      }
      Pairs factors[GROUP_UNITS];
#pragma unroll
      for (int j = 0; j < GROUP_UNITS; ++j) {
        load_floats(factors[j], shared.factors(first + j, row));
      }
#pragma unroll
      for (int j = 0; j < GROUP_UNITS; ++j) {
        if (first + j >= units) break;
        add(parts[j], factors[j]);
      }
    }
  }
  DEVICE void add(const Part& part, const Pairs& factors) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const float left = factors.x[2 * i], right = factors.x[2 * i + 1];
      float& total = state[i].x[1];
      total = __fmaf_rn(total, left, __fmul_rn(part.states.x[2 * i + 1], right));
#pragma unroll
      for (int d = 0; d < WIDTH; ++d) {
        float& x = sums[i].x[d];
        x = __fmaf_rn(x, left, __fmul_rn(part.sums[i].x[d], right));
      }
    }
  }
  DEVICE void send(const Shared& shared, int rank) const {
    const u32 to = remote_address(shared.message, rank);
    const u32 barrier = remote_address(shared.barrier, rank);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      send_floats(to + (row + i) * ROW_BYTES + lane * (WIDTH * 4), barrier, sums[i]);
      if (lane == 0) send_floats(to + ROWS * ROW_BYTES + (row + i) * 8, barrier, state[i]);
    }
  }
  DEVICE void receive(const Shared& shared, u32 parity) {
    barrier_wait_cluster(shared.barrier, parity);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      load_floats(sums[i], shared.message + (row + i) * ROW_BYTES + lane * (WIDTH * 4));
      load_floats(state[i], shared.message + ROWS * ROW_BYTES + (row + i) * 8);
    }
    if (threadIdx.x == 0) barrier_expect(shared.barrier, MESSAGE_BYTES);  // the next state
  }
  // `at`: of the first token, in heads.
  DEVICE void store(const Output& output, int num_rows, long long at) const {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      if (row + i >= num_rows) continue;
      const float factor = __fdiv_rn(output.value_scale, state[i].x[1]);
      const long long its = at + (row + i) / GROUP * HEADS;
      OUT_TYPE::Storage* to =
          output.out + its * (GROUP * SIZE) + (row + i) % GROUP * SIZE + lane * WIDTH;
#pragma unroll
      for (int d = 0; d < WIDTH; d += 2) {
        store_pair(to + d, finish_pair(sums[i].x[d], sums[i].x[d + 1], factor, output.quanta));
      }
    }
  }
};

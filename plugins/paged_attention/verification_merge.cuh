// Where the thread blocks of verification.cu put units, their merge, and the output.
#pragma once

#include "paged_attention/verification_tiles.cuh"

constexpr int ROW_BYTES = SIZE * 4;
constexpr int WIDTH = SIZE / 32;        // dimensions of a lane
constexpr int OWN_ROWS = ROWS / WARPS;  // that a warp merges
constexpr int STATES_BYTES = UNITS * ROWS * 8, MESSAGE_BYTES = ROWS * (ROW_BYTES + 8);
static_assert(ROWS % WARPS == 0, "every warp merges as many rows");
static_assert(ROWS * ROW_BYTES <= 2 * TILE_BYTES, "a unit lies where its tiles were");

struct Shared {
  u32 tiles;    // keys and values of each unit
  u32 states;   // largest and total of each unit and row
  u32 message;  // what another block has handed on: sums, then largest and total
  u32 queries, barrier;
  Gathered* gathered;

  static constexpr int BYTES =
      UNITS * 2 * TILE_BYTES + STATES_BYTES + MESSAGE_BYTES + ROWS * SIZE * 2 + 16;
  DEVICE explicit Shared(u8* memory) {
    tiles = shared_address(memory);
    states = tiles + UNITS * 2 * TILE_BYTES;
    message = states + STATES_BYTES;
    queries = message + MESSAGE_BYTES;
    barrier = queries + ROWS * SIZE * 2;
    gathered = (Gathered*)(memory + BYTES);
  }
  // Sums of a row of a unit.
  DEVICE u32 sums(int nth, int row) const { return tiles + 2 * nth * TILE_BYTES + row * ROW_BYTES; }
  DEVICE u32 state(int nth, int row) const { return states + (nth * ROWS + row) * 8; }
};
static_assert(Shared::BYTES + sizeof(Gathered) <= SHARED_BYTES, "room for all of it");

template <int N>
struct Floats {
  float x[N];
};
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
// Into another block's shared memory, counted by that block's barrier.
DEVICE void send_floats(u32 to, u32 barrier, const Floats<2>& y) {
  store_remote_pair(to, barrier, y.x[0], y.x[1]);
}
DEVICE void send_floats(u32 to, u32 barrier, const Floats<4>& y) {
  store_remote(to, barrier, y.x[0], y.x[1], y.x[2], y.x[3]);
}

// Where `offset` bytes of a row lie, such that rows that are stored at once fall on all banks.
DEVICE int turned(int row, int offset) {
  const int turn = IS_BYTE ? row / 2 % 2 * 64 : row / 2 % 4 * 32;
  return offset / 128 * 128 + (offset % 128 ^ turn);
}

// A warp's unit.
DEVICE void store_unit(const Shared& shared, const State& state) {
  const int lane = lane_id(), nth = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
    const float other = __shfl_xor_sync(~0u, state.total[n], 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + lane % 4 * 2 + c;
      if (lane < 4) {
        const float total = c == 0 ? state.total[n] : other;
        store_floats(shared.state(nth, row), {state.largest[n][c], total});
      }
      const u32 to = shared.sums(nth, row) + lane / 4 * (IS_BYTE ? 8 : 4);
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const float first = state.sums[n][i][c], second = state.sums[n][i][c + 2];
        if (IS_BYTE) {  // dimensions side by side
          store_floats(to + turned(row, i * 64), {first, second});
        } else {  // or 8 apart
          store_float(to + turned(row, i * 64), first);
          store_float(to + turned(row, i * 64 + 32), second);
        }
      }
    }
  }
}

struct Output {
  OUT_TYPE::Storage* out;
  float value_scale, quanta;
};

// What a thread has merged: WIDTH dimensions of each of its warp's rows.
struct Merged {
  Floats<2> state[OWN_ROWS];  // largest, total
  Floats<WIDTH> sums[OWN_ROWS];

  static DEVICE int row(int i) { return threadIdx.x / 32 * OWN_ROWS + i; }
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      state[i] = {minus_infinity(), 0.0f};
#pragma unroll
      for (int d = 0; d < WIDTH; ++d) sums[i].x[d] = 0.0f;
    }
  }
  // The block's units from left to right, behind what another block hands on. Everything that needs
  // no other block is done before the wait for it.
  DEVICE void append(const Shared& shared, int units, bool has_before, u32 parity) {
    Floats<2> its[OWN_ROWS][UNITS];
    Floats<WIDTH> part[OWN_ROWS][UNITS];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const u32 from = shared.sums(0, row(i)) + turned(row(i), lane_id() * (WIDTH * 4));
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        its[i][j] = {minus_infinity(), 0.0f};
        if (j < units) load_floats(its[i][j], shared.state(j, row(i)));
        load_floats(part[i][j], from + j * (2 * TILE_BYTES));
      }
    }
    if (SPLITS > 1 && has_before) receive(shared, parity);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      float left[UNITS], right[UNITS];
      float& largest = state[i].x[0];
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const float top = fmaxf(largest, its[i][j].x[0]), base = finite(top);
        left[j] = exp2(__fsub_rn(largest, base)), right[j] = exp2(__fsub_rn(its[i][j].x[0], base));
        largest = top;
      }
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        if (j >= units) break;
        float& total = state[i].x[1];
        total = __fmaf_rn(total, left[j], __fmul_rn(its[i][j].x[1], right[j]));
#pragma unroll
        for (int d = 0; d < WIDTH; ++d) {
          float& x = sums[i].x[d];
          x = __fmaf_rn(x, left[j], __fmul_rn(part[i][j].x[d], right[j]));
        }
      }
    }
  }
  DEVICE void send(const Shared& shared, int rank) const {
    const u32 to = remote_address(shared.message, rank);
    const u32 barrier = remote_address(shared.barrier, rank);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      send_floats(to + row(i) * ROW_BYTES + lane_id() * (WIDTH * 4), barrier, sums[i]);
      if (lane_id() == 0) send_floats(to + ROWS * ROW_BYTES + row(i) * 8, barrier, state[i]);
    }
  }
  DEVICE void receive(const Shared& shared, u32 parity) {
    barrier_wait_cluster(shared.barrier, parity);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      load_floats(sums[i], shared.message + row(i) * ROW_BYTES + lane_id() * (WIDTH * 4));
      load_floats(state[i], shared.message + ROWS * ROW_BYTES + row(i) * 8);
    }
    if (threadIdx.x == 0) barrier_expect(shared.barrier, MESSAGE_BYTES);  // the next
  }
  // `at`: of the first token, in heads.
  DEVICE void store(const Output& output, int num_rows, long long at) const {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      if (row(i) >= num_rows) continue;
      const float factor = __fdiv_rn(output.value_scale, state[i].x[1]);
      const long long its = at + row(i) / GROUP * HEADS;
      OUT_TYPE::Storage* to =
          output.out + its * (GROUP * SIZE) + row(i) % GROUP * SIZE + lane_id() * WIDTH;
#pragma unroll
      for (int d = 0; d < WIDTH; d += 2) {  // + 0: no negative zeros
        const u32 pair = MODEL_TYPE::pack_pair(__fmaf_rn(sums[i].x[d], factor, 0.0f),
                                               __fmaf_rn(sums[i].x[d + 1], factor, 0.0f));
#if STATIC
        const float low = MODEL_TYPE::unpack(u16(pair)), high = MODEL_TYPE::unpack(u16(pair >> 16));
        *(u16*)(to + d) =
            E4M3::pack_pair(__fmul_rn(low, output.quanta), __fmul_rn(high, output.quanta));
#else
        *(u32*)(to + d) = pair;
#endif
      }
    }
  }
};

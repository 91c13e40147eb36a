// How the thread blocks of long.cu that share a context merge what they have stored (Entries): each takes some quarters
// of rows, four dimensions per thread, and goes through all entries from left to right. Also how rows are written that one
// thread block has merged alone.
#pragma once

#include "ops/paged_attention/long/units.cuh"
#include "ops/paged_attention/shared/meeting.cuh"

constexpr int QUARTER = SIZE / 4;           // dimensions of a piece of a row
constexpr int PIECE_THREADS = QUARTER / 4;  // four dimensions each
constexpr int AT_ONCE = COMPUTING / PIECE_THREADS;  // pieces
constexpr int BATCH = 16;   // entries whose factors are computed together, one a lane
constexpr int AHEAD = 48;   // entries on their way to a thread
constexpr int MOST_ROWS = AT_ONCE / 4 + 1;  // of the pieces at once
static_assert(MOST_ROWS <= COMPUTING / BATCH, "half a warp for the factors of a row");
static_assert(QUARTER * 4 == 128, "a piece is a line");
static_assert(AHEAD * COMPUTING * 16 <= Tiles::FACTORS_AT, "where the tiles were");

// By how much a row's sums so far, and those of a work item, are multiplied; and what its total is then.
struct alignas(16) Factor {
  float left, right, total, unused;
};
static_assert(2 * MOST_ROWS * BATCH * sizeof(Factor) <= OPERAND_BYTES, "where queries were");

DEVICE void meet_computing() { asm volatile("barrier.sync %0, %1;" ::"r"(2), "n"(COMPUTING) : "memory"); }

// Waits for all thread blocks of a context; what they stored may be read.
DEVICE void meet_shares(int* counter, int count) {
  meet_computing();
  if (threadIdx.x == THREADS) wait_for_others(counter, count);
  meet_computing();
}

// Leaves the meeting; how many had come or left before. Asked before merging, as the answer takes as long as an access to L2.
DEVICE int leave_shares(int* counter) { return threadIdx.x == THREADS ? count_leaving(counter) : 0; }

// The last one to leave sets the counter to zero.
DEVICE void clear_shares(int* counter, int left, int count, int mergers) {
  if (threadIdx.x == THREADS && left == count + mergers - 1) *counter = 0;
}

// A thread block that has stored its work items and merges nothing comes, and does not stay.
DEVICE void pass_shares(int* counter) {
  meet_computing();
  if (threadIdx.x == THREADS) wait_for_others(counter, 0);
}

// The factors of one row, BATCH work items after another, by as many lanes.
struct RowFactors {
  const Entries& entries;
  int row, count;  // of work items
  bool is_used;
  float2 states[AHEAD / BATCH];  // of the lane's work item in the next batches
  float so_far;    // the largest before it

  DEVICE RowFactors(const Entries& entries_, int row_, int count_, bool is_used_)
      : entries(entries_), row(row_), count(count_), is_used(is_used_), so_far(minus_infinity()) {
#pragma unroll
    for (int i = 0; i < AHEAD / BATCH; ++i) states[i] = load(i * BATCH);
  }
  DEVICE float2 load(int first) const {
    const int unit = first + threadIdx.x % BATCH;
    float2 state = {minus_infinity(), 0.0f};
    if (is_used && unit < count) {
      asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                   : "=f"(state.x), "=f"(state.y)
                   : "l"(&entries.state(unit, row)));
    }
    return state;
  }
  DEVICE void find(Factor* to, int batch) {
    const int lane = threadIdx.x % BATCH;
    const float2 its = states[0];
#pragma unroll
    for (int i = 1; i < AHEAD / BATCH; ++i) states[i - 1] = states[i];
    states[AHEAD / BATCH - 1] = load(batch + AHEAD);
    float top = its.x;  // the largest of this work item and those before it
#pragma unroll
    for (int d = 1; d < BATCH; d *= 2) {
      const float other = __shfl_up_sync(~0u, top, d, BATCH);
      if (lane >= d) top = fmaxf(top, other);
    }
    top = fmaxf(so_far, top);
    float before = __shfl_up_sync(~0u, top, 1, BATCH);
    if (lane == 0) before = so_far;
    so_far = __shfl_sync(~0u, top, BATCH - 1, BATCH);
    const float base = finite(top);
    const float left = exp2(__fsub_rn(before, base)), right = exp2(__fsub_rn(its.x, base));
    if (is_used) to[lane] = {left, right, __fmul_rn(its.y, right), 0.0f};
  }
};

// Merges and writes what thread block `nth` of `num_shares` takes of the rows' pieces.
DEVICE void merge_entries(const Tiles& shared, u8* memory, const Part& part, int count, int nth,
                        int num_shares, OUT_TYPE::Storage* out, float value_scale, float quanta) {
  const Entries& entries = part.entries;
  const int pieces = 4 * part.rows, each = (pieces + num_shares - 1) / num_shares;
  const int end = min((nth + 1) * each, pieces), thread = threadIdx.x - THREADS;
  Factor* factors = (Factor*)(memory + Tiles::FACTORS_AT);
#pragma unroll 1
  for (int first = nth * each; first < end; first += AT_ONCE) {
    const int piece = first + thread / PIECE_THREADS, row = piece / 4, first_row = first / 4;
    const bool is_used = piece < end;
    // The thread's four dimensions of each work item, which it brings for itself.
    const float4* from =
        entries.record(0, row, piece % 4 * (QUARTER / 16), 0) + thread % PIECE_THREADS;
    const long long entry = (long long)entries.rows * (SIZE / 4);
    const u32 own = shared.base + thread * 16;
    constexpr u32 FAR = COMPUTING * 16;  // from one work item's to the next
    // Addresses by one addition each: few warps merge, and every instruction of theirs takes several cycles.
    const auto bring = [&](int batch) {
      const u32 to = own + batch % AHEAD * FAR;
      const float4* its = from + batch * entry;
      const int left = is_used ? count - batch : 0;
#pragma unroll
      for (int i = 0; i < BATCH; ++i, its += entry) {
        if (i >= left) continue;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * FAR), "l"(its) : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int batch = 0; batch < AHEAD; batch += BATCH) bring(batch);
    // Factors of the next batch are found while this one is merged, by warps that have no pieces, where there are some.
    const int factor_row = (COMPUTING - 1 - thread) / BATCH;
    const int last_row = (min(first + AT_ONCE, end) - 1) / 4;
    RowFactors its(entries, first_row + factor_row, count, first_row + factor_row <= last_row);
    const bool finds = __any_sync(~0u, its.is_used);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total = 0.0f;
    if (finds) its.find(factors + factor_row * BATCH, 0);
#pragma unroll 1
    for (int batch = 0; batch < count; batch += BATCH) {
      const int turn = batch / BATCH % 2;
      asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD / BATCH - 1) : "memory");
      meet_computing();
      if (finds && batch + BATCH < count) {
        its.find(factors + ((turn ^ 1) * MOST_ROWS + factor_row) * BATCH, batch + BATCH);
      }
      if (is_used) {
        const Factor* of_row = factors + (turn * MOST_ROWS + row - first_row) * BATCH;
        const u32 at = own + batch % AHEAD * FAR;
        constexpr int SOME = 8;  // loaded together, without branches between them
#pragma unroll 1
        for (int some = 0; some < BATCH; some += SOME) {
          float x[SOME][4];
          Factor by[SOME];
#pragma unroll
          for (int i = 0; i < SOME; ++i) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[i][0]), "=f"(x[i][1]), "=f"(x[i][2]), "=f"(x[i][3])
                         : "r"(at + (some + i) * FAR)
                         : "memory");
            by[i] = of_row[some + i];
          }
#pragma unroll
          for (int i = 0; i < SOME; ++i) {
            const bool is_there = batch + some + i < count;  // behind the last one may be anything
            const float its_total = __fmaf_rn(total, by[i].left, by[i].total);
            total = is_there ? its_total : total;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
              const float sum = __fmaf_rn(sums[d], by[i].left, __fmul_rn(x[i][d], by[i].right));
              sums[d] = is_there ? sum : sums[d];
            }
          }
        }
      }
      // Lines that nobody reads any more leave L2 without being written to memory, which the products that follow would wait
      // for. The eight threads of a piece have two each of sixteen.
      if (is_used) {
        const float4* line = from - thread % PIECE_THREADS;
#pragma unroll
        for (int i = thread % PIECE_THREADS; i < BATCH; i += PIECE_THREADS) {
          if (batch + i >= count) break;
          asm volatile("discard.global.L2 [%0], 128;" ::"l"(line + (batch + i) * entry) : "memory");
        }
      }
      bring(batch + AHEAD);
    }
    meet_computing();  // the factors of the last batch have been read
    if (!is_used) continue;
    const float factor = __fdiv_rn(value_scale, total);
    const long long token = part.token + row / GROUP;
    const int at = piece % 4 * QUARTER + thread % PIECE_THREADS / 4 * 16 + thread % 4 * 2;
    OUT_TYPE::Storage* its_out =
        out + (token * HEADS + part.head) * (GROUP * SIZE) + row % GROUP * SIZE + at;
    store_pair(its_out, finish_pair(sums[0], sums[1], factor, quanta));
    store_pair(its_out + 8, finish_pair(sums[2], sums[3], factor, quanta));
  }
}

// Writes the rows of a context that the thread block has merged alone.
DEVICE void write_merged(const State& all, const Part& part, OUT_TYPE::Storage* out,
                         float value_scale, float quanta) {
  const Item item = {part.head, part.token, part.rows, 0, 0, 0};
  store(all, item, out, value_scale, quanta);
}

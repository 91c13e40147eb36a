// How the warps that share a long context in batch.cu merge its work items together: each takes lines of the
// states, one sum a lane, and goes through all stored entries from left to right. Used where all warps of the
// launch run at once, because they wait for each other.
#pragma once

#include "ops/paged_attention/batch_state.cuh"
#include "ops/paged_attention/meeting.cuh"
#include "ops/paged_attention/output.cuh"

constexpr int STATE_LINES = STEPS * 4 + 3;  // of a block of columns: sums, two of `largest`, `total`
constexpr int SUM_LINES = COLUMN_BLOCKS * STEPS * 4;  // of 32 floats
constexpr int PIECES = 8 + 2;  // of 16 bytes: a line of sums; `largest` and `total` of four columns
constexpr int FETCHED = SLOTS * TILE_BYTES / (16 * PIECES);  // entries in the ring at once

// Waits for all warps of a context; what they stored may be read.
DEVICE void meet_parts(int* counter, int count) {
  __syncwarp();
  if (threadIdx.x == 0) wait_for_others(counter, count);
  __syncwarp();
}

// The last one to leave sets the counter to zero.
DEVICE void leave_parts(int* counter, int count) {
  if (threadIdx.x == 0) leave_others(counter, count);
}

DEVICE float load_shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// One line of the sums of all entries, as StateOf::append merges them.
struct MergedLine {
  float largest, total, sum;

  DEVICE void append(float other_largest, float other_total, float other_sum) {
    const float top = fmaxf(largest, other_largest), base = finite(top);
    const float left = exp2(__fsub_rn(largest, base));
    const float right = exp2(__fsub_rn(other_largest, base));
    largest = top;
    total = __fmaf_rn(total, left, __fmul_rn(other_total, right));
    sum = __fmaf_rn(sum, left, __fmul_rn(other_sum, right));
  }

  // Line i of block n of columns of `count` entries, `stride` floats apart. The ring is free.
  DEVICE void gather(const float* entries, int stride, int count, int n, int i, u32 ring) {
    largest = minus_infinity(), total = 0.0f, sum = 0.0f;
    const float* block = entries + n * (STATE_LINES * 32);
    const int column = i % 2;
    const u32 sums = ring + lane_id() * 4, states = ring + 128 + lane_id() % 4 * 4;
#pragma unroll 1
    for (int from = 0; from < count; from += FETCHED) {
      const int fetched = min(FETCHED, count - from);
#pragma unroll 4
      for (int piece = lane_id(); piece < fetched * PIECES; piece += 32) {
        const int nth = piece / PIECES, inside = piece % PIECES;
        int at = i * 32 + inside * 4;
        if (inside == 8) at = (STEPS * 4 + column) * 32;
        if (inside == 9) at = (STEPS * 4 + 2) * 32 + column * 4;  // of lanes that sum up this column
        copy_chunk(ring + piece * 16, block + (long long)(from + nth) * stride + at);
      }
      commit_copies();
      wait_for_copies<0>();
      __syncwarp();
#pragma unroll 8
      for (int nth = 0; nth < fetched; ++nth) {
        const u32 own = nth * (16 * PIECES);
        append(load_shared_float(states + own), load_shared_float(states + own + 16),
               load_shared_float(sums + own));
      }
      __syncwarp();
    }
  }
};

// What one warp of `num_parts` merges and writes; rows of `out` start with the request's first token.
DEVICE void merge_lines(const float* entries, int stride, int count, int part, int num_parts,
                        int num_rows, int head, long long first_token, OUT_TYPE::Storage* out,
                        float value_scale, float quanta, u32 ring) {
#pragma unroll 1
  for (int line = part; line < SUM_LINES; line += num_parts) {
    const int n = line / (STEPS * 4), i = line % (STEPS * 4);
    MergedLine merged;
    merged.gather(entries, stride, count, n, i, ring);
    const int row = 8 * n + lane_id() % 4 * 2 + i % 2;
    if (row >= num_rows) continue;
    const u32 pair = finish_pair(merged.sum, 0.0f, __fdiv_rn(value_scale, merged.total), quanta);
    const long long token = first_token + row / GROUP;
    OUT_TYPE::Storage* to = out + (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE;
    to[value_dimension(i / 4, i % 4 / 2)] =
        OUT_TYPE::Storage(pair & ((1u << (8 * OUT_TYPE::bytes)) - 1));
  }
}

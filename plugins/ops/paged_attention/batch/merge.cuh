// How work items of a context that several warps of batch.cu share are merged, from left to right.
//
// If all warps of the launch run concurrently, some wait for all others; each of these takes lines of the states, one sum
// per lane, and goes through all stored entries. The factors of an entry and of all before it depend only on their largest
// logits, so the lanes compute these factors first, each for some entries, while the sums are being loaded.
// Otherwise the warp that finishes last merges whole states, with as many in flight as its ring has room for.
#pragma once

#include "ops/paged_attention/batch/arrivals.cuh"
#include "ops/paged_attention/batch/state.cuh"
#include "ops/paged_attention/shared/output.cuh"

constexpr int STATE_LINES = STEPS * 4 + 3;  // of a block of columns: sums, two of `largest`, `total`
constexpr int SUM_LINES = COLUMN_BLOCKS * STEPS * 4;  // of 32 floats
constexpr int AT_ONCE = 12;  // entries whose factors a lane finds at once
constexpr int HALF_LINES = STEPS * 2;  // of a block's sums, those of one `largest`
// Of an entry in the ring: a line of sums; `largest` and `total` of four columns; factors of four columns.
constexpr int SUM_BYTES = 128, TOP_BYTES = 32, FACTOR_BYTES = 4 * 16;

// A line that nobody reads any more is not written to memory.
DEVICE void drop_line(const float* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

DEVICE float load_shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// What an entry does to a column of all before it, as in StateOf::append: sums are multiplied by `left` and the
// entry's by `right` added; `total` is the entry's total times `right`.
struct Factors {
  float left, right, total;

  DEVICE void store(u32 address) const {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(left), "f"(right),
                 "f"(total), "f"(total)
                 : "memory");
  }
  DEVICE void load(u32 address) {
    float unused;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(left), "=f"(right), "=f"(total), "=f"(unused)
                 : "r"(address)
                 : "memory");
  }
};

// Up to MOST lines of the sums of all entries, as StateOf::append merges them.
template <int MOST>
struct MergedLines {
  // Entries in the ring at once. Columns' factors lie 16 bytes apart on the banks.
  static constexpr int FETCHED =
      (SLOTS * TILE_BYTES - 64) / (MOST * SUM_BYTES + TOP_BYTES + FACTOR_BYTES) / 8 * 8;
  static constexpr int COLUMN_BYTES = FETCHED * 16 + 16;
  static_assert(FETCHED >= 32, "room for work items");
  float total, sum[MOST];
  u32 sums, tops, factors;  // in the ring
  bool drops;

  DEVICE MergedLines(u32 ring, bool drops_)
      : sums(ring),
        tops(ring + MOST * FETCHED * SUM_BYTES),
        factors(tops + FETCHED * TOP_BYTES),
        drops(drops_) {}

  // Of a line's four columns: a lane copies the `largest` or the `total` of every 16th entry.
  DEVICE void copy_tops(const float* block, int stride, int count, int column) const {
    const int lane = lane_id(), inside = lane % 2 ? (STEPS * 4 + 2) * 32 + column * 4 : (STEPS * 4 + column) * 32;
    const float* from = block + lane / 2 * stride + inside;
    u32 to = tops + lane * 16;
#pragma unroll 2
    for (int nth = lane / 2; nth < count; nth += 16) {
      copy_chunk(to, from);
      from += 16 * stride, to += 16 * TOP_BYTES;
    }
    commit_copies();
  }
  DEVICE void copy_sums(const float* block, int stride, int count, int i, u32 sums) const {
    const int lane = lane_id();
    const float* from = block + lane / 8 * stride + i * 32 + lane % 8 * 4;
    u32 to = sums + lane * 16;
#pragma unroll 4
    for (int nth = lane / 8; nth < count; nth += 4) {
      copy_chunk(to, from);
      from += 4 * stride, to += 4 * SUM_BYTES;
    }
    commit_copies();
  }

  // The factors of `count` entries. Eight groups of four lanes have a range each, a lane a column. Returns the largest
  // logit of the lane's column, of these entries and `largest`, that of all before.
  DEVICE float find_factors(int count, float largest) const {
    const int group = lane_id() / 4, column = lane_id() % 4, each = (count + 7) / 8;
    const int begin = min(group * each, count), end = min(begin + each, count);
    const u32 its = tops + column * 4;
    float top = minus_infinity();
#pragma unroll 1
    for (int at = begin; at < end; at += AT_ONCE) {
      float own[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) own[j] = load_shared_float(its + min(at + j, end - 1) * TOP_BYTES);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) top = fmaxf(top, own[j]);
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_up_sync(~0u, top, lanes));
    const float before = __shfl_up_sync(~0u, top, 4);
    top = fmaxf(largest, __shfl_sync(~0u, top, 28 + column));
    if (group > 0) largest = fmaxf(largest, before);
    const u32 to = factors + column * COLUMN_BYTES;
#pragma unroll 1
    for (int at = begin; at < end; at += AT_ONCE) {
      float own[AT_ONCE], total[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const u32 from = its + min(at + j, end - 1) * TOP_BYTES;
        own[j] = load_shared_float(from), total[j] = load_shared_float(from + 16);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const float both = fmaxf(largest, own[j]), base = finite(both);
        Factors found;
        found.left = exp2(__fsub_rn(largest, base));
        found.right = exp2(__fsub_rn(own[j], base));
        found.total = __fmul_rn(total[j], found.right);
        if (at + j < end) found.store(to + (at + j) * 16);
        largest = both;
      }
    }
    return top;
  }

  // Lines i, i + 2, ... of block n of columns of `count` entries, `stride` floats apart. The ring is free. is_known:
  // factors of the columns are there.
  DEVICE void gather(const float* entries, int stride, int count, int n, int i, int lines, bool is_known) {
    total = 0.0f;
#pragma unroll
    for (int l = 0; l < MOST; ++l) sum[l] = 0.0f;
    float largest = minus_infinity();
    const float* block = entries + n * (STATE_LINES * 32);
#pragma unroll 1
    for (int from = 0; from < count; from += FETCHED, block += FETCHED * stride) {
      const int fetched = min(FETCHED, count - from);
      if (!is_known) copy_tops(block, stride, fetched, i % 2);
      if (MOST == 1) {
        copy_sums(block, stride, fetched, i, sums);
      } else {
#pragma unroll 1
        for (int l = 0; l < lines; ++l) {
          copy_sums(block, stride, fetched, i + 2 * l, sums + l * (FETCHED * SUM_BYTES));
        }
      }
      if (!is_known) {
        if (MOST == 1) wait_for_copies<1>();
        if (MOST > 1) wait_for_copies<0>();
        __syncwarp();
        largest = find_factors(fetched, largest);
      }
      wait_for_copies<0>();
      __syncwarp();
      if (drops) drop(block, stride, fetched, i, lines);
      u32 at = sums + lane_id() * 4, its = factors + lane_id() % 4 * COLUMN_BYTES;
#pragma unroll 8
      for (int nth = 0; nth < fetched; ++nth) {
        Factors by;
        by.load(its + nth * 16);
        total = __fmaf_rn(total, by.left, by.total);
#pragma unroll
        for (int l = 0; l < MOST; ++l) {
          const float x = load_shared_float(at + l * (FETCHED * SUM_BYTES) + nth * SUM_BYTES);
          sum[l] = __fmaf_rn(sum[l], by.left, __fmul_rn(x, by.right));
        }
      }
      __syncwarp();
    }
  }
  DEVICE void drop(const float* block, int stride, int count, int i, int lines) const {
#pragma unroll 1
    for (int l = 0; l < lines; ++l) {
#pragma unroll 1
      for (int nth = lane_id(); nth < count; nth += 32) drop_line(block + nth * stride + (i + 2 * l) * 32);
    }
  }
};

constexpr int ENTRY_BYTES = State::FLOATS * 128, MOST_ENTRIES = SLOTS * TILE_BYTES / ENTRY_BYTES;
static_assert(MOST_ENTRIES > 1, "entries in the ring");

// The states of all entries, merged by one warp; its ring is free.
DEVICE void merge_alone(State& merged, const float* entries, int count, u32 ring, bool drops) {
  const int lane = lane_id();
  const auto bring = [&](int nth, int slot) {  // a lane has every 32nd 16 bytes
    if (nth < count) {
      const float* from = entries + nth * (ENTRY_BYTES / 4) + lane * 4;
      const u32 to = ring + slot * ENTRY_BYTES + lane * 16;
#pragma unroll
      for (int at = 0; at < ENTRY_BYTES; at += 512) {
        if (ENTRY_BYTES - at >= 512 || lane * 16 < ENTRY_BYTES - at) copy_chunk(to + at, from + at / 4);
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < MOST_ENTRIES - 1; ++i) bring(i, i);
  int slot = 0, before = MOST_ENTRIES - 1;  // the slot of an entry, and of the one before it
  merged.clear();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    wait_for_copies<MOST_ENTRIES - 2>();
    __syncwarp();
    bring(i + MOST_ENTRIES - 1, before);
    const u32 at = ring + slot * ENTRY_BYTES + lane * 4;
    State its;
    its.each([&](float& x, int line) { x = load_shared_float(at + line * 128); });
    if (drops) {
      for (int line = lane; line < State::FLOATS; line += 32) {
        drop_line(entries + i * (ENTRY_BYTES / 4) + line * 32);
      }
    }
    if (i == 0) {
      merged = its;
    } else {
      merged.append(its);
    }
    before = slot;
    slot = slot + 1 == MOST_ENTRIES ? 0 : slot + 1;
  }
}

// Lines that a warp merges where `parts` share them.
DEVICE int lines_of_merger(int parts) { return (SUM_LINES + parts - 1) / parts; }

// The lines of one of those that merge. Lines of the same columns follow each other; rows of `out` start with the
// request's first token.
template <int MOST>
DEVICE void merge_lines(const float* entries, int stride, int count, int merger, int each,
                        int num_rows, int head, long long first_token, OUT_TYPE::Storage* out,
                        float value_scale, float quanta, u32 ring, bool drops) {
  int known = -1;
  MergedLines<MOST> merged(ring, drops);
  const int end = min((merger + 1) * each, SUM_LINES);
  int lines = 1;
#pragma unroll 1
  for (int line = merger * each; line < end; line += lines) {
    const int columns = line / HALF_LINES, n = columns / 2, i = line % HALF_LINES * 2 + columns % 2;
    lines = min(min(MOST, end - line), (columns + 1) * HALF_LINES - line);
    merged.gather(entries, stride, count, n, i, lines, columns == known);
    if (count <= MergedLines<MOST>::FETCHED) known = columns;
    const int row = 8 * n + lane_id() % 4 * 2 + i % 2;
    if (row < num_rows) {
      const float factor = __fdiv_rn(value_scale, merged.total);
      const long long token = first_token + row / GROUP;
      OUT_TYPE::Storage* to = out + (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE;
#pragma unroll
      for (int l = 0; l < MOST; ++l) {
        if (l >= lines) continue;
        const u32 pair = finish_pair(merged.sum[l], 0.0f, factor, quanta);
        const int its = i + 2 * l;
        to[value_dimension(its / 4, its % 4 / 2)] = OUT_TYPE::Storage(pair & ((1u << (8 * OUT_TYPE::bytes)) - 1));
      }
    }
  }
}

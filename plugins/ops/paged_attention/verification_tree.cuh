// Trees of tokens in verification.cu: keys behind the root, for each token those of its path.
//
// Tiles that lie before the root are shared by all tokens of a request, and are processed as those of a
// chain. The tiles from the root's on are the tail. In logical order a token's keys there are those of
// the same tile before the root, then its path; in the cache path keys lie scattered behind the root. So the
// cache's part from the root's tile on is copied once (the window), and each product reads the rows of
// it that a table gives for the token: the same numbers in the same order as when the path is decoded token by
// token. A request without a tree has the path 0, 1, 2, ...
//
// One warp for each block of 8 columns (ROWS / 8 warps beside those of work items) goes on where the root's work
// item has stopped, tokens one after another; columns of other tokens see nothing, which leaves their
// state as it is.
#pragma once

#include "ops/paged_attention/verification_merge.cuh"

constexpr int NO_ROW = WINDOW_KEYS;  // a row of zeros
constexpr int WINDOW_PAGES = WINDOW_KEYS / TOKENS_PER_BLOCK + (TOKENS_PER_BLOCK > KEYS);
constexpr int TAIL_TOKENS = ROWS / GROUP;  // of a thread block
constexpr int BLOCK_TOKENS = GROUP < 8 ? 8 / GROUP : 1;  // of a block of columns
static_assert(!TREE || (8 % GROUP == 0 && WINDOW_PAGES <= 32), "whole tokens in 8 columns");

typedef StateOf<STEPS, 1> ColumnState;

// What store_unit has stored, of one block of columns.
DEVICE void load_unit(ColumnState& state, const Shared& shared, int unit, int block) {
  const int lane = lane_id();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 8 * block + lane % 4 * 2 + c;
    Floats<2> its;
    load_floats(its, shared.state(unit, row));
    state.largest[0][c] = its.x[0];
    if (bool(lane & 4) == bool(c)) state.total[0] = its.x[1];
    const u32 from = shared.sums(unit, row) + lane / 4 * (IS_BYTE ? 8 : 4);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float &first = state.sums[0][i][c], &second = state.sums[0][i][c + 2];
      if (IS_BYTE) {
        load_floats(its, from + turned(row, i * 64));
        first = its.x[0], second = its.x[1];
      } else {
        first = load_float(from + turned(row, i * 64));
        second = load_float(from + turned(row, i * 64 + 32));
      }
    }
  }
}

// Rows of the window that a token's keys of a tile are read from.
struct PathKeys {
  u32 rows[BLOCKS];  // addresses of the lane's key of each 16, and its chunk 0

  DEVICE u32 at(int block, int chunk) const { return rows[block] ^ (chunk << 4); }
  DEVICE void look_up(u32 window, const u8* table) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      rows[b] = window + place(table[16 * b + lane_id() % 16], lane_id() / 16);
    }
  }
};

struct Tail {
  Numbers numbers;
  int root, first;  // positions of the root, and of the window's first key
  int nth;          // the block of columns

  DEVICE Tail() : nth(int(threadIdx.x) / 32 - UNITS) {}
  // Tiles before it are shared by all tokens.
  static DEVICE int first_tile(const Numbers& numbers) {
    return max(numbers.limit - (numbers.end - numbers.start), 0) / KEYS;
  }
  DEVICE void start(const Numbers& now) {
    numbers = now, root = max(now.limit - (now.end - now.start), 0);
    first = root / KEYS * KEYS;
  }
  DEVICE int thread() const { return threadIdx.x - 32 * UNITS; }

  // Zeros of the row behind the window, of keys and of values.
  DEVICE void clear_row(const Shared& shared) const {
    if (nth == 0 && lane_id() < 2 * CHUNKS) {
      const u32 row = shared.window + lane_id() / CHUNKS * WINDOW_BYTES + WINDOW_KEYS * LINE;
      store_shared_zero(row + lane_id() % CHUNKS * 16);
    }
  }
  static DEVICE void store_shared_zero(u32 to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  // Copies keys and values from the root's tile on, together with the other warps of the tail.
  DEVICE void copy_window(const Shared& shared, const KV_TYPE::Storage* cache, int head,
                          const int* table, int stride, int num_pages) const {
    const int first_entry = first / TOKENS_PER_BLOCK, entry = first_entry + lane_id();
    int page = lane_id() < WINDOW_PAGES && entry < stride ? load_int(table + entry) : 0;
    page = u32(page) < u32(num_pages) ? page : 0;  // those after the last are undefined
    const int keys = min(min(numbers.limit, stride * TOKENS_PER_BLOCK) - first, WINDOW_KEYS);
    const int chunk = thread() % CHUNKS;
#pragma unroll 4
    for (int base = 0; base < keys; base += (TAILS > 0 ? TAILS : 1) * KEY_STEP) {
      const int key = base + thread() / CHUNKS, at = first + key;
      const long long number = __shfl_sync(~0u, page, (at / TOKENS_PER_BLOCK - first_entry) % 32);
      const KV_TYPE::Storage* from = cache + number * (2 * PAGE) +
                                     head * (TOKENS_PER_BLOCK * SIZE) +
                                     at % TOKENS_PER_BLOCK * SIZE + chunk * (16 / KV_TYPE::bytes);
      if (key < keys) {
        copy_chunk(shared.window + place(key, chunk), from);
        copy_chunk(shared.window + WINDOW_BYTES + place(key, chunk), from + PAGE);
      }
    }
    commit_copies();
  }
  // The row of the window of each key of the tail, for every token of the warp's columns.
  DEVICE void find_rows(const Shared& shared, const int* positions, const int* tree_start,
                        const int* paths, int path_stride, int request, int first_token,
                        int num_tokens) const {
    const int tree = load_int(tree_start + request), count = numbers.end - numbers.start;
#pragma unroll
    for (int t = 0; t < BLOCK_TOKENS; ++t) {
      const int nth_token = nth * BLOCK_TOKENS + t, token = first_token + nth_token;
      const bool is_real = token < count && u32(numbers.start + token) < u32(num_tokens);
      const int position = is_real ? load_int(positions + numbers.start + token) : -1;
      const int* path = paths + (long long)(tree + token) * path_stride;
      u32 rows = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + 4 * lane_id() + i, depth = key - root;
        int node = depth;
        if (tree >= 0 && is_real && depth >= 0 && depth < path_stride) node = load_int(path + depth);
        int row = depth < 0 ? key - first : root - first + node;
        const bool is_seen = key <= position && u32(depth < 0 ? 0 : node) < u32(count);
        rows |= u32(is_seen && u32(row) < WINDOW_KEYS ? row : NO_ROW) << (8 * i);
      }
      ((u32*)shared.rows[nth_token])[lane_id()] = rows;
    }
  }
  DEVICE void meet() const {  // the warps of the tail
    if (TAILS == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(32 * (TAILS > 0 ? TAILS : 1)) : "memory");
    }
  }
  // Adds the tail's tiles [tile, end) to the state of the warp's columns.
  DEVICE void add_tiles(ColumnState& state, const Shared& shared, int tile, int end, float scale,
                        bool is_first) const {
    Queries queries;
    queries.at = shared.queries + nth * (STEPS * 256) + lane_id() * 8;
    const int2 seen = *(const int2*)(shared.gathered->seen + 8 * nth + lane_id() % 4 * 2);
#pragma unroll 1
    for (; tile < end; ++tile) {
#pragma unroll 1
      for (int t = 0; t < BLOCK_TOKENS; ++t) {
        const int position = shared.gathered->seen[8 * nth + t * GROUP];
        if (position < tile * KEYS) continue;
        const u8* rows = shared.rows[nth * BLOCK_TOKENS + t] + (tile * KEYS - first);
        PathKeys keys;
        keys.look_up(shared.window, rows);
        LogitsOf<BLOCKS, 1> logits;
        multiply_keys(logits, queries, keys);
        const bool is_own = lane_id() % 4 * 2 / GROUP == t || GROUP == 1;
        int last[1][2] = {{seen.x - tile * KEYS, seen.y - tile * KEYS}};
        if (GROUP == 1) {
          if (lane_id() % 4 * 2 != t) last[0][0] = -1;
          if (lane_id() % 4 * 2 + 1 != t) last[0][1] = -1;
        } else if (!is_own) {
          last[0][0] = last[0][1] = -1;
        }
        u32 weights[1][BLOCKS][2];
        soften(state, logits, weights, last, scale, true, is_first);
        keys.look_up(shared.window + WINDOW_BYTES, rows);
        multiply_values(state.sums, weights, keys);
        is_first = false;
      }
    }
  }

  // Whether the thread block has a work item of the tail, in some round.
  DEVICE bool is_hosted(int rank) const {
    const int unit = root_unit(), next = count_units(first / KEYS + 2) - 1;
    return unit / UNITS % SPLITS == rank || next / UNITS % SPLITS == rank;
  }
  DEVICE int root_unit() const { return count_units(first / KEYS + 1) - 1; }
  // Finishes the tail's work items, of those of a round.
  DEVICE void finish(const Shared& shared, int start, int units, int tiles, float scale) const {
    const int first_tile = first / KEYS, own = root_unit();
#pragma unroll 1
    for (int unit = max(own, start); unit < min(min(own + 2, start + UNITS), units); ++unit) {
      const bool goes_on = unit_start(unit) < first_tile;  // where a warp has stopped
      ColumnState state;
      state.clear();
      if (goes_on) {
        stopped_sync();
        load_unit(state, shared, unit - start, nth);
      }
      const int end = min(min(unit_start(unit + 1), tiles), first_tile + 2);
      add_tiles(state, shared, max(unit_start(unit), first_tile), end, scale, !goes_on);
      store_unit(shared, state, unit - start, nth);
    }
  }
  // The root's work item is stored up to the root's tile.
  static DEVICE void stopped() {
    asm volatile("bar.arrive 2, %0;" ::"n"(32 * (TAILS + 1)) : "memory");
  }
  static DEVICE void stopped_sync() {
    asm volatile("bar.sync 2, %0;" ::"n"(32 * (TAILS + 1)) : "memory");
  }
};

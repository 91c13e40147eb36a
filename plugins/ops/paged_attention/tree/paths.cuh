// Trees of tokens: for each token, the keys on its path after the root.
//
// Tiles before the root's tile are shared by all tokens of a request, and are processed as those of a chain. The tiles
// from the root's tile on are the tail. In logical order, a token's keys there are those of the same tile before the
// root, then those of its path; in the cache the keys of a path lie scattered after the root. So the cache's part from
// the root's tile on is copied once (the window), and each product reads the rows of it that a table lists for the
// token: the same numbers in the same order as when the path is decoded token by token. A request without a tree has the
// path 0, 1, 2, ...
//
// A warp processes a block of 8 columns: all keys of a tile that its tokens read from the same rows in one product, then
// those that differ, token by token; there the columns of other tokens have softmax weights of zero, which leave their
// sums unchanged.
//
// The root is the first of a request's tokens in this step, or earlier steps have stored it and other tokens of the paths.
#pragma once

#include "ops/paged_attention/batch/state.cuh"

constexpr int WINDOW_KEYS = WINDOW_TILES * KEYS;  // from the root's tile on; behind them a row of zeros
constexpr int WINDOW_BYTES = WINDOW_KEYS * LINE + (LINE > 128 ? LINE : 128);
constexpr int NO_ROW = WINDOW_KEYS;  // a row of zeros
constexpr int WINDOW_PAGES = WINDOW_KEYS / TOKENS_PER_BLOCK + (TOKENS_PER_BLOCK > KEYS);
constexpr int BLOCK_TOKENS = GROUP < 8 ? 8 / GROUP : 1;  // of a block of columns
static_assert(NO_ROW <= 255, "tables have numbers of 8 bits");
static_assert(!TREE || (8 % GROUP == 0 && WINDOW_PAGES <= 32), "whole tokens in 8 columns");

constexpr int OWN_STEPS = STEPS / PARTS, OWN_CHUNKS = CHUNKS / PARTS;  // of the values that a thread block has
typedef StateOf<OWN_STEPS, 1> ColumnState;

// Rows of the window that a token's keys of 16 are read from: the address of the lane's key, and its chunk 0.
struct PathKeys {
  u32 row;

  DEVICE PathKeys(u32 window, int its_row) : row(window + place(its_row, lane_id() / 16)) {}
  DEVICE u32 at(int, int chunk) const { return row ^ (chunk << 4); }
};

// The same of a tile's four times 16 keys.
struct PathTile {
  u32 rows[BLOCKS];

  DEVICE void set(int block, u32 window, int its_row) { rows[block] = PathKeys(window, its_row).row; }
  DEVICE u32 at(int block, int chunk) const { return rows[block] ^ (chunk << 4); }
};

// Which requests of a step have trees: arrays as in `DeviceStep`. No request does where `stride` is 0.
struct StepTrees {
  const int *start, *root, *paths;
  int stride;  // of paths

  DEVICE int load_start(int request) const { return stride > 0 ? load_int(start + request) : -1; }
  DEVICE Numbers load_numbers(const int* cu_q, const int* kv_lens, int request) const {
    return {load_int(cu_q + request), load_int(cu_q + request + 1), load_int(kv_lens + request),
            load_start(request), load_int(root + request)};
  }
};

// The positions of a warp's tokens; -1 where there is no token.
struct ColumnTokens {
  int positions[BLOCK_TOKENS];
};

// A tile of the tail, and the tokens of a warp's columns. Of 16 keys that two tokens read from the same rows, as
// they do before the root, one product is for both; otherwise each token has its own, and the other's columns of it
// are not used.
static_assert(BLOCK_TOKENS * BLOCKS <= 32, "a bit for each token and block");
struct ColumnTile {
  static constexpr u32 EVERY_TOKEN = ~0u / ((1u << BLOCKS) - 1);  // bit 0 of each token's
  const int* sees;  // the last key that each column sees
  const u8 (*table)[WINDOW_KEYS];
  int tile, first;  // the tile's first key in the window

  // The next token from `token` on that sees keys of the tile.
  DEVICE int next(int token) const {
    while (token < BLOCK_TOKENS && sees[token * GROUP] < tile * KEYS) ++token;
    return token;
  }
  DEVICE int row(int token, int block) const {
    return table[token][first + 16 * block + lane_id() % 16];
  }
  // Whether the lane's column 2 (lane % 4) + c of logits is one of the token's.
  static DEVICE bool is_own(int token, int c) { return (lane_id() % 4 * 2 + c) / GROUP == token; }
  // The token of the lane's column of weights.
  static DEVICE int own_token() { return lane_id() / 4 / GROUP; }
  static DEVICE u32 bit(int token, int block) { return 1u << (token * BLOCKS + block); }

  // Logits of all columns. `base`: the first token that sees the tile. Returns which tokens read other rows than that
  // one, and in which blocks of 16 keys.
  DEVICE u32 find_logits(LogitsOf<BLOCKS, 1>& logits, const Queries& queries, u32 window,
                         int base) const {
    u32 differs = 0, apart = 0;
    PathTile keys;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const int its = row(base, b);
      int all = its;  // that some token reads
      bool is_apart = false;
#pragma unroll
      for (int t = 1; t < BLOCK_TOKENS; ++t) {
        const bool is_other = t > base && sees[t * GROUP] >= tile * KEYS;
        const int other = is_other ? row(t, b) : its;
        if (__any_sync(~0u, other != its)) differs |= bit(t, b);
        is_apart |= all != NO_ROW && other != NO_ROW && other != all;
        all = all == NO_ROW ? other : all;
      }
      const bool is_one = !__any_sync(~0u, is_apart);  // a row behind a token's path is not seen by it
      if (!is_one) apart |= EVERY_TOKEN << b;
      keys.set(b, window, is_one ? all : its);
    }
    multiply_keys(logits, queries, keys);
#pragma unroll 1
    for (u32 left = differs & apart; left > 0; left &= left - 1) {
      const int at = __ffs(left) - 1, t = at / BLOCKS;
      LogitsOf<1, 1> own;
      multiply_keys(own, queries, PathKeys(window, row(t, at % BLOCKS)));
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (b == at % BLOCKS && is_own(t, i % 2)) logits[0][b][i] = own[0][0][i];
        }
      }
    }
    return differs;
  }
  // Adds values times weights, for each column block after block: paths that have parted do not meet again, so a
  // token's own blocks come behind those it shares.
  DEVICE void add_values(SumsOf<OWN_STEPS, 1>& sums, const u32 (&weights)[1][BLOCKS][2], u32 window,
                         int base, u32 differs) const {
    const u32 own = differs >> own_token() * BLOCKS;  // blocks that the token of the lane's weights reads by itself
    PathTile values;
    u32 shared[1][BLOCKS][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      values.set(b, window, row(base, b));
#pragma unroll
      for (int i = 0; i < 2; ++i) shared[0][b][i] = own >> b & 1 ? 0 : weights[0][b][i];
    }
    multiply_values(sums, shared, values);
#pragma unroll 1
    for (u32 left = differs; left > 0; left &= left - 1) {
      const int at = __ffs(left) - 1, t = at / BLOCKS;
      u32 its[1][BLOCKS][2] = {};
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (b == at % BLOCKS && own_token() == t) its[0][0][i] = weights[0][b][i];
        }
      }
      multiply_block(sums, its, PathKeys(window, row(t, at % BLOCKS)), 0);
    }
  }
};

// A request's tail.
struct TreePaths {
  Numbers numbers;
  int root, first;  // positions of the root, and of the window's first key

  static DEVICE int find_root(const Numbers& its) {  // the first token of a request without a tree
    return its.tree < 0 ? max(its.limit - (its.end - its.start), 0) : min(max(its.root, 0), its.limit);
  }
  // Tiles before it are shared by all tokens.
  static DEVICE int first_tile(const Numbers& numbers) { return find_root(numbers) / KEYS; }
  DEVICE void start(const Numbers& now) {
    numbers = now, root = find_root(now);
    first = root / KEYS * KEYS;
  }
  DEVICE int root_unit() const { return count_units(first / KEYS + 1) - 1; }

  // Zeros of the row behind the window, of keys and of values; by one warp.
  static DEVICE void clear_row(u32 window) {
    if (lane_id() >= 2 * CHUNKS) return;
    const u32 row = window + lane_id() / CHUNKS * WINDOW_BYTES + WINDOW_KEYS * LINE;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(row + lane_id() % CHUNKS * 16),
                 "r"(0)
                 : "memory");
  }
  // The lane's page of the window; `table` is the request's.
  DEVICE int load_page(const int* table, int stride) const {
    const int entry = first / TOKENS_PER_BLOCK + lane_id();
    const bool is_used = lane_id() < WINDOW_PAGES && entry < stride;
    const int page = load_int(table + (is_used ? entry : 0));
    return is_used ? page : 0;
  }
  // Copies keys from the root's tile on, and the nth part of their values to where the first would be, by THREADS_OF_IT
  // threads together, of which each lane has its page.
  template <int THREADS_OF_IT>
  DEVICE void copy_window(u32 window, int thread, const KV_TYPE::Storage* cache, int head, int nth,
                          int page, int stride, int num_pages) const {
    const int first_entry = first / TOKENS_PER_BLOCK;
    page = u32(page) < u32(num_pages) ? page : 0;  // those after the last are undefined
    const int keys = min(min(numbers.limit, stride * TOKENS_PER_BLOCK) - first, WINDOW_KEYS);
    const int chunk = thread % CHUNKS;
#pragma unroll 4
    for (int base = 0; base < keys; base += THREADS_OF_IT / CHUNKS) {
      const int key = base + thread / CHUNKS, at = first + key;
      const long long number = __shfl_sync(~0u, page, (at / TOKENS_PER_BLOCK - first_entry) % 32);
      const KV_TYPE::Storage* from = cache + number * (2 * PAGE) +
                                     head * (TOKENS_PER_BLOCK * SIZE) +
                                     at % TOKENS_PER_BLOCK * SIZE + chunk * (16 / KV_TYPE::bytes);
      if (key < keys) {
        copy_chunk(window + place(key, chunk), from);
        if (chunk < OWN_CHUNKS) {
          copy_chunk(window + WINDOW_BYTES + place(key, chunk), from + PAGE + nth * OWN_SIZE);
        }
      }
    }
    commit_copies();
  }
  // The positions of a warp's tokens from first_token on.
  DEVICE ColumnTokens load_tokens(const int* positions, int first_token, int num_tokens) const {
    ColumnTokens its;
#pragma unroll
    for (int t = 0; t < BLOCK_TOKENS; ++t) {
      const int token = first_token + t;
      const bool is_real = token < numbers.end - numbers.start &&
                           u32(numbers.start + token) < u32(num_tokens);
      const int position = load_int(positions + (is_real ? numbers.start + token : 0));
      its.positions[t] = is_real ? position : -1;
    }
    return its;
  }
  // The row of the window of each key of the tail, for these tokens from first_token on: nth and those behind it of
  // the table.
  DEVICE void find_rows(u8 (*table)[WINDOW_KEYS], const ColumnTokens& its, const StepTrees& trees,
                        int first_token, int nth) const {
    const int tree = numbers.tree, count = numbers.limit - root, lane = lane_id();
    constexpr int FOURS = (WINDOW_KEYS / 4 + 31) / 32, SOME = BLOCK_TOKENS < 2 ? BLOCK_TOKENS : 2;
#pragma unroll
    for (int first_of = 0; first_of < BLOCK_TOKENS; first_of += SOME) {
      int nodes[SOME][FOURS][4];  // all are asked for before one is waited for, and none waits for positions
#pragma unroll
      for (int t = 0; t < SOME; ++t) {
        const int token = first_token + first_of + t;
        const bool has_path = tree >= 0 && token < numbers.end - numbers.start;
#pragma unroll
        for (int n = 0; n < FOURS; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int depth = first - root + 4 * (lane + 32 * n) + i;
            const bool is_node = has_path && u32(depth) < u32(trees.stride);
            const int its = load_int(trees.paths + (is_node ? (long long)(tree + token) * trees.stride + depth : 0));
            nodes[t][n][i] = is_node ? its : depth;
          }
        }
      }
#pragma unroll
      for (int t = 0; t < SOME; ++t) {
        const int position = its.positions[first_of + t];
#pragma unroll
        for (int n = 0; n < FOURS; ++n) {
          const int four = lane + 32 * n;
          u32 rows = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first + 4 * four + i, depth = key - root, node = nodes[t][n][i];
            const int row = depth < 0 ? key - first : root - first + node;
            const bool is_seen = key <= position && u32(depth < 0 ? 0 : node) < u32(count);
            rows |= u32(is_seen && u32(row) < WINDOW_KEYS ? row : NO_ROW) << (8 * i);
          }
          if (four < WINDOW_KEYS / 4) ((u32*)table[nth + first_of + t])[four] = rows;
        }
      }
    }
  }
  // Adds the tail's tiles [tile, end) to the state of a warp's columns. sees: the last key that each of them sees;
  // table: rows of the columns' tokens.
  DEVICE void add_tiles(ColumnState& state, u32 window, const Queries& queries, const int* sees,
                        const u8 (*table)[WINDOW_KEYS], int tile, int end, float scale,
                        bool is_first) const {
    const int2 seen = *(const int2*)(sees + lane_id() % 4 * 2);
#pragma unroll 1
    for (; tile < end; ++tile) {
      const ColumnTile its = {sees, table, tile, tile * KEYS - first};
      const int base = its.next(0);
      if (base == BLOCK_TOKENS) continue;  // no token sees it
      LogitsOf<BLOCKS, 1> logits;
      const u32 differs = its.find_logits(logits, queries, window, base);
      const int last[1][2] = {{seen.x - tile * KEYS, seen.y - tile * KEYS}};
      u32 weights[1][BLOCKS][2];
      soften(state, logits, weights, last, scale, true, is_first);
      its.add_values(state.sums, weights, window + WINDOW_BYTES, base, differs);
      is_first = false;
    }
  }
};

// What verification.cu reads: the step's parameters, tiles of keys and values, queries.
#pragma once

#define COLUMNS ROWS  // of a warp: each has all rows
#define QUERY_BYTES (ROWS * SIZE * 2)
#include "ops/paged_attention/tree/paths.cuh"

constexpr int TAILS = TREE ? ROWS / 8 : 0;  // warps for the keys behind a tree's root
constexpr int WARPS = UNITS + TAILS + SPARE_WARPS, THREADS = 32 * WARPS;  // the spare ones merge
constexpr bool HAS_SHARES = SPLITS == 2 && !TREE;  // the first block may have fewer work items than the second
constexpr int LEAST_SHARE = !HAS_SHARES ? UNITS : UNITS > 8 ? 7 : (UNITS - 2) / 2;
constexpr int FIRST_TILES = unit_start(SPLITS * UNITS) - unit_start((SPLITS - 1) * LEAST_SHARE);
constexpr int FIRST_PAGES = FIRST_TILES * KEYS / TOKENS_PER_BLOCK + (TOKENS_PER_BLOCK > KEYS);
constexpr int SPARE = UNITS == 12 ? 4 : UNITS == 10 ? 2 : UNITS;  // work items from one to the one whose slot its second tile may use
constexpr int PAGE_LOADS = (FIRST_PAGES + 31) / 32;
static_assert(SPLITS > 1, "the block before hands on what is merged");
static_assert(ROWS <= 32, "a lane reads the position of a row");

// What a thread block collects in shared memory before it computes.
struct Gathered {
  alignas(8) int seen[ROWS];  // the last key that a row sees
  int tiles, all_tiles;       // before a tree's root's; that any row sees
  Numbers numbers;
  int pages[FIRST_PAGES];  // of the block's first work items, from first_page() on
  float value_scale, quanta;
};

DEVICE int first_page(int rank) {
  return (HAS_SHARES ? rank * LEAST_SHARE : unit_start(rank * UNITS)) * KEYS / TOKENS_PER_BLOCK;
}

// How many work items the first block has: three fewer than the second, which waits for what the first has merged, where
// two hold all those of a context and each has one tile. With second tiles, from the 18th tile on, that is slower. Few
// instructions, because nothing is copied before them.
DEVICE int first_share(int tiles) {
  if (!HAS_SHARES) return UNITS;
  if (UNITS > 8) return tiles == 17 ? 7 : UNITS;  // shorter contexts have eight work items a block
  return tiles > UNITS && tiles <= 2 * UNITS ? max(tiles - UNITS, (tiles - 3) / 2) : UNITS;
}
static_assert(!HAS_SHARES || LEAST_SHARE < 16, "work items of one tile");
static_assert(!HAS_SHARES || UNITS <= 8 || UNITS >= 10, "the second block holds ten of 17");

// The step parameters as a warp reads them for its block.
struct First {
  int number, pages[PAGE_LOADS];

  DEVICE void read(const int* cu_q, const int* kv_lens, const StepTrees& trees, int request,
                   const int* table, int rank, int stride) {
    const int lane = lane_id(), entry = first_page(rank) + lane;
    number = read_number(cu_q, kv_lens, request);
    if (TREE && lane == 3) number = trees.load_start(request);
    if (TREE && lane == 4) number = load_int(trees.root + request);
#pragma unroll
    for (int i = 0; i < PAGE_LOADS; ++i) {
      pages[i] = 0;
      const bool is_used = lane + 32 * i < FIRST_PAGES && entry + 32 * i < stride;
      if (is_used) pages[i] = load_int(table + entry + 32 * i);
    }
  }
  // The entries after a request's last page are undefined.
  DEVICE void give(Gathered& to, int num_pages) const {
    const int lane = lane_id();
    if (lane < (TREE ? 5 : 3)) ((int*)&to.numbers)[lane] = number;
#pragma unroll
    for (int i = 0; i < PAGE_LOADS; ++i) {
      const int page = u32(pages[i]) < u32(num_pages) ? pages[i] : 0;
      if (lane + 32 * i < FIRST_PAGES) to.pages[lane + 32 * i] = page;
    }
  }
  DEVICE bool differs(const First& other) const {
    bool result = number != other.number;
#pragma unroll
    for (int i = 0; i < PAGE_LOADS; ++i) result |= pages[i] != other.pages[i];
    return result;
  }
};

// Copies a warp's tiles.
struct TileCopier {
  const KV_TYPE::Storage* source;  // the head's part of page 0, the lane's chunk of it
  const int* table;
  int limit;              // keys
  int pages[TILE_PAGES];  // of the tile to copy

  DEVICE TileCopier(const KV_TYPE::Storage* cache, int head, const int* table_, int lane = lane_id())
      : table(table_) {
    source = cache + head * (TOKENS_PER_BLOCK * SIZE) + lane / CHUNKS * SIZE +
             lane % CHUNKS * (16 / KV_TYPE::bytes);
  }
  DEVICE void take_pages(const int* first, int tile, int rank) {  // of a tile of the first work items
#pragma unroll
    for (int i = 0; i < TILE_PAGES; ++i) {
      pages[i] = first[tile * KEYS / TOKENS_PER_BLOCK - first_page(rank) + i];
    }
  }
  // Copies keys and values of a tile of the block's first work items.
  DEVICE void bring(u32 slot, int tile, const int* first, int rank) {
    take_pages(first, tile, rank);
    copy(slot, tile, 0);
    copy(slot + TILE_BYTES, tile, 1);
  }
  DEVICE void load_pages(int tile) {
#pragma unroll
    for (int i = 0; i < TILE_PAGES; ++i) {
      const int key = tile * KEYS + i * TOKENS_PER_BLOCK;
      pages[i] = key < limit ? load_int(table + key / TOKENS_PER_BLOCK) : 0;
    }
  }
  // The lane's chunk of the first key of a page, of those in the tile.
  DEVICE const KV_TYPE::Storage* start(int tile, int nth, int is_value) const {
    const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * (KEYS * SIZE) : 0;
    return source + pages[nth] * (2 * PAGE) + is_value * PAGE + inside;
  }
  // Copies keys or values; for a tile after the last one nothing is copied, but it is counted.
  DEVICE void copy(u32 slot, int tile, int is_value) const {
    const int key = lane_id() / CHUNKS, left = limit - tile * KEYS;
    if (left > 0) {
      slot += place(key, lane_id() % CHUNKS);
#pragma unroll
      for (int page = 0; page < TILE_PAGES; ++page) {
        const KV_TYPE::Storage* from = start(tile, page, is_value);
#pragma unroll
        for (int i = 0; i < SPAN; i += KEY_STEP) {
          const int its = page * SPAN + i;
          const u32 to = (slot ^ ((LINE == 64 ? its / 2 : its) % 8 << 4)) + its * LINE;
          if (left >= KEYS) {
            copy_chunk(to, from + i * SIZE);
          } else {
            copy_or_clear_chunk(to, from + i * SIZE, its + key < left);
          }
        }
      }
    }
    commit_copies();
  }
};

// Queries of all rows in the layout of the products, each warp a part; zeros for missing rows.
DEVICE void stage_queries(u32 target, const MODEL_TYPE::Storage* q, int token, int head,
                          int num_rows, int num_tokens) {
  constexpr int LINES = ROWS / 8 * STEPS, OWN = (LINES + WARPS - 1) / WARPS;
  const int warp = threadIdx.x / 32;
  u32 x[OWN][2];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int line = warp + i * WARPS, row = line / STEPS * 8 + lane_id() / 4;
    const int its = token + row / GROUP;
    const bool is_real = line < LINES && row < num_rows && u32(its) < u32(num_tokens);
    const MODEL_TYPE::Storage* from =
        q + ((long long)its * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      x[i][pair] = is_real ? __ldcg((const u32*)(from + query_dimension(line % STEPS, pair))) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int line = warp + i * WARPS;
    if (line < LINES) {
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(target + line * 256 + lane_id() * 8),
                   "r"(to_inner(x[i][0])), "r"(to_inner(x[i][1]))
                   : "memory");
    }
  }
}

// Shared memory of few_fp8.cu, and how its producer warpgroup loads tiles. Boxes of the cache are copied unchanged, which
// is the layout in which tensor cores read keys; values are transposed on their way to registers (products.cuh).
#pragma once

#include "backends/cuda/sm90/held_product.cuh"
#include "ops/paged_attention/shared/meeting.cuh"
#include "ops/paged_attention/shared/operands.cuh"
#include "ops/paged_attention/shared/output.cuh"

#include "ops/paged_attention/few_fp8/plan.cuh"

constexpr int COMPUTING = 256;                 // threads of two warpgroups, behind THREADS of a third
constexpr int ALL_THREADS = THREADS + COMPUTING;
constexpr int BRINGING = THREADS / 32 / 2;     // warps of THREADS that bring keys; as many bring values
constexpr int TILE_BYTES = KEYS * SIZE;        // of its keys, or its values
constexpr int ROWS_BYTES = ROWS * 128;         // queries, or weights of a tile
constexpr int ONES_BYTES = 8 * 128;            // of a product's right operand
static_assert(KEYS == 128 && SIZE == 128 && KV_TYPE::bytes == 1, "keys, dimensions and weights are rows of 128 bytes");
static_assert(SPAN >= 8, "a box is whole atoms of the swizzle");

// What logits of two rows are multiplied by, and what is added: WEIGHT_POWER less the base.
struct alignas(16) Pair {
  float scale[2], shift[2];
};

// What is known of each row, a column of the products.
struct Columns {
  Pair pairs[ROWS / 2];           // what logits become exponents with, of two rows
  float base[ROWS];               // of the work item
  float fade[ROWS];               // factor for sums of a chain's earlier tiles, where bases are raised
  float chain_fade[ROWS];         // and for those of the work item's chains before, if any base was raised in this one
  float total[ROWS];              // of weights of a chain
  float left[ROWS], right[ROWS];  // factors for what has been merged, and for a work item behind it
  float all_base[ROWS], all_total[ROWS];  // of what has been merged
  int top[2][ROWS];               // the largest logit of a tile, in order: of a work item's first one, of another one
  int last_key[ROWS];             // that it sees

  DEVICE float& scale(int row) { return pairs[row / 2].scale[row % 2]; }
  DEVICE float& shift(int row) { return pairs[row / 2].shift[row % 2]; }
};

// The model's: of keys, of values, and what one in the output is multiplied by.
struct Scales {
  float key, value, quanta;
};

struct Places {
  u32 base;

  static constexpr int KEYS_AT = 2 * ROWS_BYTES;  // weights are first: products read up to 64 rows of them, and what is behind
  static constexpr int VALUES_AT = KEYS_AT + SLOTS * TILE_BYTES;
  static constexpr int QUERIES_AT = VALUES_AT + SLOTS * TILE_BYTES;
  static constexpr int ONES_AT = QUERIES_AT + ROWS_BYTES;
  static constexpr int MERGED_AT = ONES_AT + ONES_BYTES;
  static constexpr int BARRIERS_AT = MERGED_AT + ROWS * SIZE * 4;
  static constexpr int COLUMNS_AT = BARRIERS_AT + 8 * (2 * SLOTS + 1) / 16 * 16;
  static constexpr int PLACE_AT = COLUMNS_AT + (sizeof(Columns) + 15) / 16 * 16;
  static constexpr int RANGE_AT = PLACE_AT + (sizeof(Place) + 15) / 16 * 16;
  static constexpr int SCALES_AT = RANGE_AT + sizeof(Range);
  static constexpr int BYTES = SCALES_AT + sizeof(Scales);

  DEVICE u32 keys(int slot) const { return base + KEYS_AT + slot * TILE_BYTES; }
  DEVICE u32 values(int slot) const { return base + VALUES_AT + slot * TILE_BYTES; }
  DEVICE u32 queries() const { return base + QUERIES_AT; }
  DEVICE u32 ones() const { return base + ONES_AT; }
  DEVICE u32 weights(int nth) const { return base + nth * ROWS_BYTES; }
  DEVICE u32 full_keys(int slot) const { return base + BARRIERS_AT + 8 * slot; }
  DEVICE u32 full_values(int slot) const { return full_keys(SLOTS + slot); }

  DEVICE void init_barriers() const {
    for (int i = 0; i < 2 * SLOTS; ++i) barrier_init(full_keys(i), BRINGING);
    barrier_init_fence();
  }
  // By `count` threads.
  DEVICE void put_ones(int thread, int count) const {
    constexpr u32 ONE = 0x38383838;  // four times, in E4M3
    for (int i = thread; i < ONES_BYTES / 16; i += count) store_shared(base + ONES_AT + 16 * i, ONE, ONE, ONE, ONE);
    shared_fence();
  }
};
static_assert(Places::BYTES <= SHARED_BYTES, "room for all of it");

// Which of a context's tiles the thread block has. Of a context that is shared, which is its only one, that is known.
DEVICE Share share_of(const Contexts& at, const volatile Range& range, const volatile Place& place) {
  if (place.count == 0) return at.share(range);
  Share its;
  its.begin = place.share.begin, its.end = place.share.end, its.first_unit = place.share.first_unit;
  return its;
}

DEVICE int pages_of(int limit) { return (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK; }

// Every thread of the block comes; whether any of them says so.
DEVICE bool meet_any(bool is_so) {
  u32 any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(u32(is_so)), "n"(ALL_THREADS)
               : "memory");
  return any;
}
DEVICE void meet_adding() { asm volatile("barrier.sync %0, %1;" ::"r"(3), "n"(THREADS) : "memory"); }
DEVICE void meet_all() { asm volatile("barrier.sync %0, %1;" ::"r"(1), "n"(ALL_THREADS) : "memory"); }

// The caches of all layers as rows of 128 bytes, in boxes of a head's keys of a page or of a tile; the layer's first row.
struct Cache {
  const TensorMap* map;
  int first_row;
};

// The tiles of a thread block, one after another, as `Contexts` goes through them. By four warps, each of which has every second box of
// keys or of values. They ask for as many tiles as there are slots before others come to the first, and for one more with each that
// these leave.
struct Bringer {
  Places places;
  Cache cache;
  const int* block_tables;
  const Requests& requests;
  const volatile Range& range;
  const volatile Place& place;
  Contexts at;
  Pages pages;
  int warp, tile, end, own_tiles;  // those from own_tiles on have keys of this step, which the kernel before may still be writing
  Ring<SLOTS> ring;
  bool has_more;

  DEVICE Bringer(const Places& places_, const Cache& cache_, const int* tables, const Requests& requests_,
                 const volatile Range& range_, const volatile Place& place_)
      : places(places_), cache(cache_), block_tables(tables), requests(requests_), range(range_), place(place_), has_more(true) {
    warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    at.start_at_end(range);
    aim();
  }
  DEVICE void aim() {
    const Share share = share_of(at, range, place);
    tile = share.begin, end = share.end;
    own_tiles = max(min(at.keys - at.tokens, at.limit), 0) / KEYS;
    pages.table = block_tables + (long long)at.request * requests.table_stride, pages.count = pages_of(at.limit);
    if (tile < end) pages.start(tile);
  }
  DEVICE void fetch_next() {
    while (has_more && tile >= end) {
      has_more = at.advance(requests, range);
      if (has_more) aim();
    }
    if (!has_more) return;
    if (tile >= own_tiles) wait_for_dependencies();
    pages.reach(tile);
    const int present = min(TILE_PAGES, pages.count - Pages::entry_of(tile));
    const int first = warp / 2, count = (present - first + BRINGING - 1) / BRINGING, is_value = warp % 2;
    const u32 full = is_value ? places.full_values(ring.slot) : places.full_keys(ring.slot);
    const u32 to = is_value ? places.values(ring.slot) : places.keys(ring.slot);
    const bool is_one = lane_id() == 0;
    if (is_one) barrier_expect(full, count * (SPAN * SIZE));
    const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * KEYS : 0;
    const int own_row = cache.first_row + (is_value * HEADS + at.nth % HEADS) * TOKENS_PER_BLOCK + inside;
    constexpr int MOST = (TILE_PAGES + BRINGING - 1) / BRINGING, TOGETHER = MOST < 4 ? MOST : 4;  // boxes that do not wait for each other
#pragma unroll TOGETHER
    for (int i = 0; i < MOST; ++i) {
      const int nth = first + i * BRINGING;
      const int row = own_row + pages.page(tile, nth) * (2 * HEADS * TOKENS_PER_BLOCK);
      if (is_one && i < count) copy_box(to + nth * (SPAN * SIZE), cache.map, 0, row, full, EVICT_FIRST);
    }
    __syncwarp();
    ring.advance(), ++tile;
  }
};

// How the contexts of a step are divided among thread blocks that all run concurrently: the number of blocks of each context
// follows from the context lengths in this step, so that the longest shares of all contexts are about equally long.
#pragma once

#include "ops/paged_attention/long/share.cuh"
#if TREE
#include "ops/paged_attention/tree/columns.cuh"
#endif

// The requests of a step, and which of them the kernel serves.
struct Requests {
  const int *cu_q, *kv_lens;
  int table_stride, block_tokens, max_tokens, count;
#if TREE
  columns::StepTrees trees;

  DEVICE Numbers load(int request) const { return trees.load_numbers(cu_q, kv_lens, request); }
#else
  DEVICE Numbers load(int request) const {
    return {load_int(cu_q + request), load_int(cu_q + request + 1), load_int(kv_lens + request)};
  }
#endif
};

// The sum of a number of all lanes up to the own.
DEVICE int sum_to_here(int x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int left = __shfl_up_sync(~0u, x, lanes);
    if (lane_id() >= lanes) x += left;
  }
  return x;
}

// A request's context, for a block of its rows.
struct Context {
  Numbers numbers;
  int limit;       // keys
  int tiles, end;  // those that are divided, and all
  int cost;        // what they take (ContextCost); 0: none

  DEVICE void load(const Requests& all, int request) {
    const int first_token = blockIdx.y / HEADS * all.block_tokens;
    cost = 0;
    if (request >= all.count) return;
    numbers = all.load(request);
    limit = min(numbers.limit, all.table_stride * TOKENS_PER_BLOCK);
    end = tiles = (limit + KEYS - 1) / KEYS;
#if TREE
    tiles = min(columns::TreePaths::first_tile(numbers), end);
    end = min(end, tiles + WINDOW_TILES);
#endif
    const int count = numbers.end - numbers.start;
    if (count <= all.max_tokens && first_token < count && limit > 0) cost = ContextCost::of(tiles) + MORE;
  }
  // Of `count` shares, of which the first one ends there.
  DEVICE int entries(int count, int first_end) const { return count > 1 ? count_units(end) - count_units(first_end + 1) + 2 : 0; }
};

// What work items take in quarters of a tile, which is about 0.29 us, where they are merged as they come and where they are stored.
typedef Costs<5, 2, 2> Merged;
typedef Costs<7, 2, 2> Stored;
constexpr int SECOND_CONTEXT = 12;  // what beginning with another context takes

// What a thread block has of which context.
struct Place {
  Context context;
  int request, rows;  // of the blocks of rows of the request's KV heads
  int nth, count;     // of the thread blocks that share the context; 0: it has none. nth < 0: one that helps two contexts
  int mergers;        // of them, those that merge
  Share share;
  int first_unit;   // of the second entry
  int first_entry;  // of the context's
  int counter;

  // By a warp, of which one lane has the context: where its share begins and ends, and where the first one of the context ends,
  // are found by three lanes at once. border_of(tiles, nth, count): where a share begins.
  template <class Border>
  DEVICE void put(const Context& its, int lane, int request_, int rows_, int nth_, int count_, const Border& border_of) {
    if (lane_id() == lane) context = its, request = request_, rows = rows_, nth = nth_, count = count_, mergers = count_;
    const int tiles = __shfl_sync(~0u, its.tiles, lane), of = __shfl_sync(~0u, count_, lane);
    const int first = __shfl_sync(~0u, nth_, lane), own = lane_id() == 2 ? 1 : first + min(lane_id(), 1);
    const int border = border_of(tiles, min(own, of), of), unit = count_units(border + 1) - 1;
    if (lane_id() == 0) share.begin = border, share.first_unit = unit;
    if (lane_id() == 1) share.end = border;
    if (lane_id() == 2) first_unit = unit;
  }
  // As `put` for the only request, where some thread blocks help. The first two shares have most work items, whose ends take
  // time. Who helps has the end of the first and the beginning of the second, of two contexts: lanes try how long the longest of
  // the four may take, from what the last share takes on.
  DEVICE void put_helped(const Context& its, int room) {
    const int splits = gridDim.x / HEADS, block = blockIdx.x, lane = lane_id(), tiles = its.tiles;
    const bool helps = block >= splits * HEADS;
    const int own = helps ? 0 : block % splits;
    const int nth_border = lane < 2 ? own + lane : lane < 4 ? lane - 1 : splits - 1;
    const int border = Share::border(tiles, MORE, min(nth_border, splits), splits);
    const int first = __shfl_sync(~0u, border, 2), second = __shfl_sync(~0u, border, 3);
    const int each = Stored::cost(tiles) - Stored::cost(__shfl_sync(~0u, border, 4));
    const int most = each + lane * (1 + each / 32), from = max(Stored::cost(second) - most, 0);
    int left = min(first, unit_start(Merged::unit_behind(most))), unit = Stored::unit_behind(from), right = unit_start(unit);
    if (Stored::cost(right) < from) right = unit_start(unit + 1);
    right = min(max(right, first), second);
    const int its_cost = 2 * (Stored::cost(right) - Stored::cost(left)) + SECOND_CONTEXT;
    const u32 fits = __ballot_sync(~0u, tiles >= LEAST_HELPED * splits && its_cost <= most);
    const int best = fits ? __ffs(fits) - 1 : 0;
    left = fits ? __shfl_sync(~0u, left, best) : first, right = fits ? __shfl_sync(~0u, right, best) : first;
    const int begin = __shfl_sync(~0u, border, 0), end = __shfl_sync(~0u, border, 1);
    if (lane > 0) return;
    const bool are = left < right;
    context = its, request = 0, rows = helps ? (block - splits * HEADS) * 2 : block / splits;
    nth = helps ? -1 : own, mergers = splits;
    count = its.cost > 0 && (are || !helps) ? splits + are : 0;
    share.begin = helps ? left : own == 1 ? right : begin;
    share.end = helps ? right : own == 0 ? left : end;
    share.first_unit = count_units(share.begin + 1) - 1, first_unit = count_units(left + 1) - 1;
    first_entry = rows * room, counter = rows * 32;
  }
};
DEVICE int num_blocks_of_rows() { return HELPS && gridDim.y == 1 ? HEADS : gridDim.y; }
DEVICE bool are_helped(const Requests& all) { return HELPS && gridDim.y == 1 && all.count == 1; }

#if !ALONE
DEVICE int border_of_shares(int tiles, int nth, int count) { return Share::border(tiles, MORE, nth, count); }

// By one warp. The least number of tiles for a share is chosen with which there are enough thread blocks for all contexts
// and room for their entries: a multiple of the largest work item, or few.
DEVICE void find_place(Place& place, const Requests& all, int room) {
  Context its;
  if (are_helped(all)) {
    its.load(all, 0);
    place.put_helped(its, room);
    return;
  }
  const int counter = blockIdx.y * 32, counters = gridDim.y * 32;  // a cache line each
  if (all.count == 1 || gridDim.z > 1) {  // all share one, or each has its own
    its.load(all, blockIdx.z);
    place.put(its, 0, blockIdx.z, blockIdx.y, blockIdx.x, its.cost > 0 ? gridDim.x : 0, border_of_shares);
    if (lane_id() == 0) place.first_entry = blockIdx.y * room, place.counter = counter;
    return;
  }
  const int lane = lane_id(), blocks = gridDim.x;
  const auto load = [&](int first) {
    if (first > 0 || all.count > 32) its.load(all, first + lane);
  };
  its.load(all, lane);
  int cost = 0, contexts = 0;
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    load(first);
    cost += __reduce_add_sync(~0u, its.cost), contexts += __popc(__ballot_sync(~0u, its.cost > 0));
  }
  // Lanes try different numbers between the least and one that is enough.
  int least = divide_up(cost, blocks, reciprocal(blocks)), step = 1;
  const int enough = int(float(cost) * reciprocal(blocks - contexts + 1)) + 1;
  if (least > MOST_UNIT) {
    least = round_up(least);
    step = (max(enough - least, 0) / (31 * MOST_UNIT) + 1) * MOST_UNIT;
  }
  int each = max(least + lane * step, 1), needed = 0;
  float by = reciprocal(each);
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    load(first);
    const int count = min(all.count - first, 32);
#pragma unroll 4
    for (int i = 0; i < count; ++i) needed += divide_up(__shfl_sync(~0u, its.cost, i), each, by);
  }
  const u32 fits = __ballot_sync(~0u, needed <= blocks);
  each = fits ? least + (__ffs(fits) - 1) * step : enough;
#pragma unroll 1
  while (true) {
    each = max(each, 1), by = reciprocal(each);
    int before = 0, entries = 0;
    if (lane == 0) place.count = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      load(first);
      const int count = its.cost > 0 ? divide_up(its.cost, each, by) : 0;
      const int own = count > 1 ? its.entries(count, border_of_shares(its.tiles, 1, count)) : 0;
      const int to = before + sum_to_here(count), last = entries + sum_to_here(own), nth = int(blockIdx.x) - (to - count);
      const u32 found = __ballot_sync(~0u, 0 <= nth && nth < count);
      if (found) place.put(its, __ffs(found) - 1, first + lane, blockIdx.y, nth, count, border_of_shares);
      if (found >> lane & 1) place.first_entry = blockIdx.y * room + last - own, place.counter = (first + lane) * counters + counter;
      before = __shfl_sync(~0u, to, 31), entries = __shfl_sync(~0u, last, 31);
    }
    if ((before <= blocks && entries <= room) || each > cost) return;
    each += each;
  }
}
#endif

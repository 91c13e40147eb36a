// How thread blocks that all run at once share the contexts of a step: each context gets a number of them that follows
// from its length in this step. So the longest share of a context is about as long as that of any other.
#pragma once

#include "ops/paged_attention/long/merge.cuh"
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

// Division that rounds up, of numbers below 2^21: x by y, whose reciprocal is known.
DEVICE int divide_up(int x, int y, float reciprocal) { return int((float(x) + (float(y) - 0.5f)) * reciprocal); }

#if !ALONE
constexpr int MORE = TREE ? TAIL_TILES : 0;  // tiles that take as long as what follows those that are divided

// A request's context, for a block of its rows.
struct Context {
  Numbers numbers;
  int limit;       // keys
  int tiles, end;  // those that are divided, and all
  int cost;        // in tiles; 0: none

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
    if (count <= all.max_tokens && first_token < count && limit > 0) cost = tiles + MORE;
  }
  // The work item with the end of the first of several shares.
  DEVICE int first_unit(int count) const { return count_units(Share::border(tiles, MORE, 1, count) + 1) - 1; }
  DEVICE int entries(int count) const { return count > 1 ? count_units(end) - first_unit(count) + 1 : 0; }
};

// What a thread block has of which context.
struct Place {
  Context context;
  int request, nth, count;  // of the thread blocks that share the context; 0: it has none
  Share share;
  int first_unit;   // of the second entry
  int first_entry;  // of the context's, among those of all contexts of a block of rows of a KV head
  int all_entries;
};
constexpr int PLACE_AT = (Tiles::BYTES + 15) / 16 * 16;
static_assert(PLACE_AT + sizeof(Place) <= SHARED_BYTES, "room for all of it");

// By one warp. The least number of tiles for a share is chosen with which there are enough thread blocks for all contexts
// and room for their entries: a multiple of the largest work item, or few.
DEVICE void find_place(Place& place, const Requests& all, int room) {
  Context its;
  const auto put = [&](int request, int nth, int count, int first_entry) {
    place.context = its, place.request = request, place.nth = nth, place.count = count;
    place.share.divide(its.tiles, MORE, nth, count);
    place.first_unit = its.first_unit(count), place.first_entry = first_entry;
  };
  if (all.count == 1 || gridDim.z > 1) {  // all share one, or each has its own
    its.load(all, blockIdx.z);
    if (lane_id() > 0) return;
    place.count = 0;
    if (its.cost > 0) put(blockIdx.z, blockIdx.x, gridDim.x, 0), place.all_entries = its.entries(gridDim.x);
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
  int least = divide_up(cost, blocks, __frcp_rn(float(blocks))), step = 1;
  const int enough = int(float(cost) * __frcp_rn(float(blocks - contexts + 1))) + 1;
  if (least > MOST_UNIT) {
    least = (least + MOST_UNIT - 1) & -MOST_UNIT;
    step = (max(enough - least, 0) / (31 * MOST_UNIT) + 1) * MOST_UNIT;
  }
  int each = max(least + lane * step, 1), needed = 0;
  float by = __frcp_rn(float(each));
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
    each = max(each, 1), by = __frcp_rn(float(each));
    int before = 0, entries = 0;
    if (lane == 0) place.count = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      load(first);
      const int count = its.cost > 0 ? divide_up(its.cost, each, by) : 0, own = its.cost > 0 ? its.entries(count) : 0;
      const int to = before + sum_to_here(count), last = entries + sum_to_here(own), nth = int(blockIdx.x) - (to - count);
      if (0 <= nth && nth < count) put(first + lane, nth, count, last - own);
      before = __shfl_sync(~0u, to, 31), entries = __shfl_sync(~0u, last, 31);
    }
    if (lane == 0) place.all_entries = entries;
    if ((before <= blocks && entries <= room) || each > cost) return;
    each += each;
  }
}
#endif

// Contexts of many requests: all tiles of a step are divided equally among thread blocks, whatever the lengths of contexts.
//
// Contexts longer than a thread block's share are divided among thread blocks that process nothing else (shares.cuh). All
// other contexts are concatenated, and the sequence is divided into equal ranges for the remaining thread blocks. A thread
// block processes the contexts of its range from right to left. If the range ends within a context, that context's
// beginning is processed first, and its merged result is passed to the next block, which processes the end of that
// context last and continues from this result. So no work item of these contexts is stored, and all thread blocks have
// equally much to do.
#pragma once

#include "ops/paged_attention/long/shares.cuh"

constexpr int EXTRA = 128 / KEYS * ContextCost::TILE;            // what a context takes besides its tiles
constexpr int SHARING = KEYS > 64 ? 3 * ContextCost::TILE : 16;  // what it takes that thread blocks share a context

constexpr int FLAG_STEP = 16;  // numbers from one thread block's flag to the next

// A range: what its tiles take, counted through the row, with EXTRA before each context; contexts that take as much as `longest` are not in
// the row. And what `Contexts` has of the last tile's context, so that those who begin there load nothing.
struct Range {
  int begin, end, longest;
  int request, nth, base, start, tokens, keys, limit, tiles;

  DEVICE void put_last(const Context& its, int request_, int nth_, int base_) {
    request = request_, nth = nth_, base = base_, start = its.numbers.start, tokens = its.numbers.end - its.numbers.start;
    keys = its.numbers.limit, limit = its.limit, tiles = its.tiles;
  }
};

// A walk through the contexts of a range: a KV head of a block of a request's rows each.
struct Contexts {
  int request, nth, base;  // nth: of the request's contexts; base: where these begin
  int start, tokens, keys, limit, tiles;

  DEVICE void load(const Requests& all) {
    start = load_int(all.cu_q + request), tokens = load_int(all.cu_q + request + 1) - start;
    keys = load_int(all.kv_lens + request);
    limit = min(keys, all.table_stride * TOKENS_PER_BLOCK);
    tiles = (limit + KEYS - 1) / KEYS;
    if (tokens > all.max_tokens || limit <= 0) tokens = 0;
  }
  DEVICE int count(const Requests& all) const {
    return tokens > 0 ? (tokens + all.block_tokens - 1) / all.block_tokens * HEADS : 0;
  }
  DEVICE int width() const { return ContextCost::of(tiles) + EXTRA; }
  DEVICE void start_at_end(const volatile Range& range) {
    request = range.request, nth = range.nth, base = range.base, start = range.start, tokens = range.tokens;
    keys = range.keys, limit = range.limit, tiles = range.tiles;
  }
  // Goes to the left; whether the range has more.
  DEVICE bool advance(const Requests& all, const volatile Range& range) {
    if (base + nth * width() <= range.begin) return false;
    if (nth-- > 0) return true;
    int its = 0;
    do {
      --request;
      load(all);
      its = ContextCost::of(tiles) < range.longest ? count(all) : 0;
    } while (its == 0);
    nth = its - 1, base -= its * width();
    return true;
  }
  // Which tiles of the context the range has: whole work items.
  DEVICE Share share(const volatile Range& range) const {
    const int first = base + nth * width() + EXTRA;
    const auto border = [&](int cost) {
      if (cost <= 0) return 0;
      return cost >= ContextCost::of(tiles) ? tiles : unit_start(ContextCost::unit_behind(cost));
    };
    Share its;
    its.begin = border(range.begin - first), its.end = border(range.end - first);
    its.first_unit = count_units(its.begin + 1) - 1;
    return its;
  }
};

// As `find_range` of the only request, where there are thread blocks for all of its contexts: by its length alone, for one request waits
// for this in every layer. Whether it is done.
DEVICE bool find_only(Range& range, Place& place, const Requests& all, int room) {
  Context its;
  its.load(all, 0);
  const int blocks = gridDim.x, block = blockIdx.x, lane = lane_id(), tiles = its.tiles;
  const int tokens = its.cost > 0 ? its.numbers.end - its.numbers.start : 0;
  const int contexts = divide_up(tokens, all.block_tokens, reciprocal(all.block_tokens)) * HEADS;
  if (contexts == 0 || contexts > blocks) return false;
  const int splits = int((float(blocks) + 0.5f) * reciprocal(contexts));
  const int least = max(divide_up(its.cost, splits, reciprocal(splits)), ContextCost::last_unit(tiles));
  // Lanes try what a share should take at most; of those that suffice, the first one writes.
  const EqualShares shares(least + lane * ContextCost::TILE);
  const int needed = its.cost > least + SHARING ? shares.count(its.cost) : 1;
  const u32 fits = __ballot_sync(~0u, needed <= splits);
  if (!fits) return false;
  const int best = __ffs(fits) - 1, times = __shfl_sync(~0u, needed, best);
  const auto border = [&](int nth) { return nth < times ? shares.begin(nth) : tiles; };
  const int first = count_units(border(1) + 1) - 1, entries = times > 1 ? count_units(its.end) - first + 1 : 0;
  if (__any_sync(~0u, lane == best && blocks + contexts * entries > room)) return false;
  if (lane != best) return true;
  const int rows = int((float(block) + 0.5f) * reciprocal(times)), nth = block - rows * times;
  range.begin = range.end = 0, range.longest = its.cost + 1;
  place.count = 0;
  if (rows >= contexts) return true;
  const int from = rows * (its.cost + EXTRA) + EXTRA, begin = border(nth), end = border(nth + 1);
  range.begin = from + begin, range.end = from + end;  // any part of the context's, for it is known which
  range.put_last(its, 0, rows, 0);
  place.context = its, place.request = 0, place.rows = rows, place.nth = nth, place.count = place.mergers = times;
  place.share.begin = begin, place.share.end = end, place.share.first_unit = count_units(begin + 1) - 1;
  place.first_unit = first, place.first_entry = blocks + rows * entries, place.counter = (blocks + rows * times) * FLAG_STEP;
  return true;
}

// By one warp. No range is shorter than a work item, so each has some of every context that it divides; and none is shorter
// than a context, where others are shared.
DEVICE void find_range(Range& range, Place& place, const Requests& all, int room) {
  if (UNIT > 1 && all.count == 1 && find_only(range, place, all, room)) return;
  const int lane = lane_id(), blocks = gridDim.x;
  Context its;
  const float by_tokens = reciprocal(all.block_tokens);
  int loaded = -1, contexts_of_it = 0;
  const auto load = [&](int first) {  // of how many contexts
    if (first == loaded) return contexts_of_it;  // of few requests only once
    its.load(all, first + lane);
    const int count = its.cost > 0 ? its.numbers.end - its.numbers.start : 0;
    loaded = first, contexts_of_it = divide_up(count, all.block_tokens, by_tokens) * HEADS;
    return contexts_of_it;
  };
  int width = 0, longest = 1, most_tiles = 0, contexts = 0;
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    const int count = load(first);
    width += __reduce_add_sync(~0u, count > 0 ? count * (its.cost + EXTRA) : 0);
    contexts += __reduce_add_sync(~0u, count), longest = max(longest, __reduce_max_sync(~0u, its.cost));
    most_tiles = max(most_tiles, __reduce_max_sync(~0u, its.cost > 0 ? its.tiles : 0));
  }
  int parts = 0, entries = 0, each = longest + 1, ranges = 0;
  const int unit = min(ContextCost::last_unit(most_tiles), longest), least = max((width + blocks - 1) / blocks, UNIT == 1 ? MOST_UNIT : unit);
  if (longest > least + SHARING) {  // lanes try what a part should take at most
    const int step = least / 30 + 1, tried = least + lane * step;
    const float by = reciprocal(tried);
    const EqualShares shares(tried);
    int needed = 0, row = 0;
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      const int own = load(first), last = min(all.count - first, 32);
#pragma unroll 4
      for (int i = 0; i < last; ++i) {
        const int count = __shfl_sync(~0u, own, i), cost = __shfl_sync(~0u, its.cost, i);
        needed += cost >= tried ? count * shares.count(cost) : 0;
        row += cost >= tried ? 0 : count * (cost + EXTRA);
      }
    }
    const u32 fits = __ballot_sync(~0u, needed + divide_up(row, tried, by) <= blocks);
    if (fits) each = least + (__ffs(fits) - 1) * step;
  }
  EqualShares shares(each);
  const auto parts_of = [&] { return its.cost >= each ? shares.count(its.cost) : 0; };
  const auto border_of = [&](int tiles, int nth, int count) {
    return UNIT == 1 ? Share::border(tiles, MORE, nth, count) : nth < count ? shares.begin(nth) : tiles;
  };
  const auto entries_of = [&](int times) { return times > 1 ? its.entries(times, border_of(its.tiles, 1, times)) : 0; };
#pragma unroll 1
  while (each <= longest) {
    int row = 0, shorter = 1;
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      const int count = load(first), own = parts_of();
      parts += __reduce_add_sync(~0u, count * own);
      entries += __reduce_add_sync(~0u, own > 0 ? count * entries_of(own) : 0);
      row += __reduce_add_sync(~0u, count > 0 && own == 0 ? count * (its.cost + EXTRA) : 0);
      shorter = max(shorter, __reduce_max_sync(~0u, own == 0 ? its.cost : 0));
    }
    if (parts + (row > 0) <= blocks && blocks + entries <= room) {
      width = row, ranges = min(blocks - parts, row / (shorter + EXTRA));
      break;
    }
    parts = entries = 0, each += each, shares = EqualShares(each);
  }
  if (each > longest) ranges = min(min(blocks, contexts), width / unit);
  ranges = max(ranges, 1);
  const int own = int(blockIdx.x) - parts;
  int end = 0;
  if (own >= 0) {  // else divisions would be for nothing
    const auto border = [&](int nth) { return int((long long)width * min(nth, ranges) / ranges); };
    end = border(own + 1);
    if (lane == 0) range.begin = border(own);
  }
  if (lane == 0) {
    range.end = end, range.longest = each;
    place.count = 0;
  }
  __syncwarp();
  int before = 0, parts_before = 0, entries_before = 0;
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    const int count = load(first), times = parts_of(), its_width = count > 0 && times == 0 ? count * (its.cost + EXTRA) : 0;
    const int its_end = before + sum_to_here(its_width);
    if (own >= 0 && its_end - its_width < end && end <= its_end) {
      const int base = its_end - its_width;
      range.put_last(its, first + lane, (end - 1 - base) / (its.cost + EXTRA), base);
    }
    before = __shfl_sync(~0u, its_end, 31);
    if (parts == 0) continue;
    const int entry = entries_of(times);
    const int last = parts_before + sum_to_here(count * times), last_entry = entries_before + sum_to_here(count * entry);
    const int nth = int(blockIdx.x) - (last - count * times);
    const u32 found = __ballot_sync(~0u, 0 <= nth && nth < count * times);
    const int rows = times > 0 ? int((float(nth) + 0.5f) * reciprocal(times)) : 0;
    if (found) {
      place.put(its, __ffs(found) - 1, first + lane, rows, nth - rows * times, times, border_of);
      __syncwarp();
    }
    if (found >> lane & 1) {  // as a range of the context alone
      const int from = rows * (its.cost + EXTRA) + EXTRA;
      range.put_last(its, first + lane, rows, 0);
      range.begin = from + place.share.begin, range.end = from + place.share.end;
      place.first_entry = blocks + last_entry - (count - rows) * entry;
      place.counter = (blocks + last - (count - rows) * times) * FLAG_STEP;
    }
    parts_before = __shfl_sync(~0u, last, 31), entries_before = __shfl_sync(~0u, last_entry, 31);
  }
}

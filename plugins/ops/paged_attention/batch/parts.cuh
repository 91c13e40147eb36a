// How the contexts of a step are divided into parts, for warps that all run concurrently and share the contexts of a KV head.
//
// Contexts of about the same length are divided into equally many parts. Otherwise all warps of a head get the same number
// of tiles, T: from contexts of T tiles or more, warps take T tiles each. The remainders of these, and the shorter contexts,
// are concatenated, and the sequence is cut every T tiles for the other warps, so that a warp may have parts of several
// contexts. Within the sequence, the later tiles of a context that is cut come first: the warp that has the context's
// first tiles processes them first, and the warp that has the later tiles processes them last and continues where the first
// one stopped. All warps read all lengths and compute the same parts. Where a context is cut changes no bit: cuts are
// between work items, which are merged in the same order.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

constexpr int FEW_ENTRIES = 2048;  // of all contexts: 9 MB of eight columns

DEVICE int next_unit(int tile) {  // the first tile, from this one on, that starts a work item
  const int size = tile < 16 ? 1 : min(1 << (highest_bit(tile) - 3), MOST_UNIT);
  return (tile + size - 1) & -size;
}

struct Context {
  int limit, start, num_rows, tiles;

  DEVICE void load(const int* kv_lens, const int* cu_q, int request) {
    limit = load_int_now(kv_lens + request), start = load_int_now(cu_q + request);
    num_rows = (load_int_now(cu_q + request + 1) - start) * GROUP;
    tiles = (limit + KEYS - 1) / KEYS;
    if (num_rows <= 0 || num_rows > COLUMNS) tiles = 0;  // another kernel's
  }
};

DEVICE int sum_to_here(int x) {  // of this lane and those before it
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int before = __shfl_up_sync(~0u, x, lanes);
    if (lane_id() >= lanes) x += before;
  }
  return x;
}

// What a warp has of its head's contexts.
struct Share {
  int request, grain;
  int each;     // T
  int longest;  // context, tiles
  int from;     // in the row, of the warp's tiles; -1: it has T tiles of one context
  int offset;   // of what is left of the request's context, in the row
  int full;     // warps that have T tiles of contexts before it
  int entries;  // before those of the context, in the head's room
  bool drops;   // whether lines leave L2 when they have been merged

  DEVICE int padded(int tiles) const { return (tiles + grain - 1) & -grain; }

  // Entries of a context of so many tiles: of its first T and of every work item behind these.
  DEVICE int entries_of(int tiles) const { return tiles > each ? 1 + count_units(tiles) - count_units(each) : 0; }

  // Whether a context has so many parts of part_tiles tiles.
  DEVICE bool fits(int tiles, int parts, int part_tiles) const {
    return tiles > (part_tiles > grain ? (part_tiles - grain) * parts : 0) && tiles <= part_tiles * parts;
  }

  // Whether there is room for the work items of contexts of so many tiles, each with so many parts.
  DEVICE bool takes(int tiles, int requests, int parts, int room) {
    entries = 2 + count_units(tiles) - count_units(grain), drops = requests * entries * HEADS > FEW_ENTRIES;
    return parts == 1 || requests * entries <= room;
  }

  // Lengths of all contexts, which stay at `scratch` in shared memory, four bytes a request. Returns whether each context is
  // divided into so many parts; where all have the length that is known in advance, into those of part_tiles tiles.
  DEVICE bool is_even(const int* kv_lens, const int* cu_q, int requests, int parts, int part_tiles, int room, u32 scratch) {
    const int warps = gridDim.x;
    int all = 0, most = 0;
    bool is_other = parts == 0;
#pragma unroll 1
    for (int r = lane_id(); r < requests; r += 32) {
      Context its;
      its.load(kv_lens, cu_q, r);
      const int tiles = padded(its.tiles);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(scratch + r * 4), "r"(tiles) : "memory");
      all += tiles, most = max(most, tiles);
      is_other = is_other || fits(its.tiles, parts, part_tiles) == false;
    }
    from = -1, each = part_tiles;
    if (!__any_sync(~0u, is_other) && takes(part_tiles * parts, requests, parts, room)) return true;
    all = __reduce_add_sync(~0u, all), most = __reduce_max_sync(~0u, most);
    longest = most, each = max(padded((all + warps - 1) / warps), grain);
    if (parts > 0 && padded((most + parts - 1) / parts) <= each + each / 16 + MOST_UNIT) {
      if (takes(most, requests, parts, room)) return true;
    }
    if (most >= each) {  // the longest ones in parts of the same size
      const int same = padded((most + most / each - 1) / (most / each));
      if (same - each <= each / 16) each = same;
    }
    return false;
  }

  // The warp's share where contexts are not even. Returns false where there is nothing left for it.
  DEVICE bool find(int requests, int room, u32 scratch) {
    const int lane = lane_id(), warp = blockIdx.x;
    bool has_full, has_rest;
    int stored;
    while (true) {
      const int in_row = (int(gridDim.x) - 1 - warp) * each;
      int before = 0, fulls = 0;
      has_full = has_rest = false, from = in_row, stored = 0;
#pragma unroll 1
      for (int first = 0; first < requests; first += 32) {
        int tiles = 0;
        if (first + lane < requests) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tiles) : "r"(scratch + (first + lane) * 4) : "memory");
        }
        const int times = tiles / each, rest = tiles - times * each, count = entries_of(tiles);
        const int to = before + sum_to_here(rest), last_full = fulls + sum_to_here(times);
        const int last = stored + sum_to_here(count);
        const u32 is_full = __ballot_sync(~0u, last_full - times <= warp && warp < last_full);
        const u32 is_rest = __ballot_sync(~0u, to - rest <= in_row && in_row < to);
        if (is_full != 0 || (is_rest != 0 && !has_full)) {
          const int its = __ffs(is_full != 0 ? is_full : is_rest) - 1;
          request = first + its, offset = __shfl_sync(~0u, to - rest, its);
          full = __shfl_sync(~0u, last_full - times, its), entries = __shfl_sync(~0u, last - count, its);
          has_full = has_full || is_full != 0, has_rest = true;
        }
        before = __shfl_sync(~0u, to, 31), fulls = __shfl_sync(~0u, last_full, 31);
        stored = __shfl_sync(~0u, last, 31);
      }
      if (int(gridDim.x) + stored <= room || each >= longest) break;
      each = longest;  // no work item is stored then
    }
    __syncwarp();
    if (has_full) from = -1;
    drops = stored * HEADS > FEW_ENTRIES;
    return has_rest;
  }

  // The next context in the row, if it begins among the warp's tiles.
  DEVICE bool next(Context& its, const int* kv_lens, const int* cu_q, int requests) {
    if (from < 0) return false;
    while (true) {
      const int tiles = padded(its.tiles), times = tiles / each;
      offset += tiles - times * each, full += times, entries += entries_of(tiles);
      if (offset >= from + each || ++request >= requests) return false;
      its.load(kv_lens, cu_q, request);
      if (padded(its.tiles) % each > 0) return true;
    }
  }
};

// A warp's part of a context.
struct Part {
  int begin, end;  // tiles
  int nth, count;  // of the context's parts
  int mergers;     // how many of the first ones merge them; 0: the second goes on from the state of the first
  int first_end;   // tiles of the first part
  int entries;     // of the context, in the head's room
  int owner;       // the warp that others of the context meet at

  DEVICE void find(const Share& share, const Context& its) {
    const int warps = gridDim.x, warp = blockIdx.x, each = share.each;
    const int tiles = share.padded(its.tiles), times = tiles / each, rest = tiles - times * each;
    const int first = share.offset / each, last = (share.offset + rest - 1) / each;  // warps in the row
    mergers = times, count = times + (rest > 0 ? last - first + 1 : 0);
    if (share.from < 0) {
      nth = warp - share.full, begin = nth * each, end = begin + each;
    } else {
      const int a = max(share.offset, share.from), b = min(share.offset + rest, share.from + each);
      begin = tiles - (b - share.offset), end = tiles - (a - share.offset);
      nth = times + last - (warps - 1 - warp);
    }
    end = min(end, its.tiles), owner = times > 0 ? share.full : warps - 1 - last;
    first_end = min(each, its.tiles), entries = times > 0 ? warps + share.entries : owner;
  }
};

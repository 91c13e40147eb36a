// Contexts of many requests: all tiles of a step are divided equally among thread blocks, however long contexts are.
//
// Contexts that are longer than what a thread block has are shared by thread blocks that have nothing else (shares.cuh). The
// others lie in a row, one after another, which is divided into equal ranges for the other thread blocks. A thread block goes
// through the contexts of its range from right to left. The beginning of a context whose end is the next one's comes first,
// and what has been merged of it is handed over; the next one comes to that end last and goes on from there. So no work item
// of theirs is stored, and every thread block has as much to do.
#pragma once

#include "ops/paged_attention/long/shares.cuh"

constexpr int EXTRA = 2;     // tiles that take as long as what a context needs besides its own
constexpr int SHARING = 16;  // tiles that take as long as what thread blocks need that share a context

constexpr int FLAG_STEP = 16;  // numbers from one thread block's flag to the next

// A range: its tiles, counted through the row, with EXTRA before each context's; the request of the last one, and where
// the request's contexts begin; contexts of so many tiles are not in the row.
struct Range {
  int begin, end, request, base, longest;
};
constexpr int RANGE_AT = PLACE_AT + sizeof(Place);
static_assert(RANGE_AT + sizeof(Range) <= SHARED_BYTES, "room for all of it");

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
  DEVICE int width() const { return tiles + EXTRA; }
  DEVICE void start_at_end(const Requests& all, const volatile Range& range) {
    request = range.request, base = range.base;
    load(all);
    nth = (range.end - 1 - base) / width();
  }
  // Goes to the left; whether the range has more.
  DEVICE bool advance(const Requests& all, const volatile Range& range) {
    if (base + nth * width() <= range.begin) return false;
    if (nth-- > 0) return true;
    int its = 0;
    do {
      --request;
      load(all);
      its = tiles < range.longest ? count(all) : 0;
    } while (its == 0);
    nth = its - 1, base -= its * width();
    return true;
  }
  // Which tiles of the context the range has: whole work items.
  DEVICE Share share(const volatile Range& range) const {
    const int first = base + nth * width() + EXTRA;
    const auto border = [&](int tile) {
      if (tile <= 0) return 0;
      return tile >= tiles ? tiles : unit_start(count_units(tile + 1) - 1);
    };
    Share its;
    its.begin = border(range.begin - first), its.end = border(range.end - first);
    its.first_unit = count_units(its.begin + 1) - 1;
    return its;
  }
};

// By one warp. No range is shorter than a work item, so each has some of every context that it divides; and none is shorter
// than a context, where others are shared.
DEVICE void find_range(Range& range, Place& place, const Requests& all, int room) {
  const int lane = lane_id(), blocks = gridDim.x;
  Context its;
  const auto load = [&](int first) {  // of how many contexts
    its.load(all, first + lane);
    const int count = its.cost > 0 ? its.numbers.end - its.numbers.start : 0;
    return (count + all.block_tokens - 1) / all.block_tokens * HEADS;
  };
  int width = 0, longest = 1, contexts = 0;
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    const int count = load(first);
    width += __reduce_add_sync(~0u, count > 0 ? count * (its.tiles + EXTRA) : 0);
    contexts += __reduce_add_sync(~0u, count), longest = max(longest, __reduce_max_sync(~0u, its.cost));
  }
  const int units = count_units(longest), unit = unit_start(units) - unit_start(units - 1);
  int parts = 0, entries = 0, each = longest + 1, ranges = min(min(blocks, contexts), width / unit);
  const int least = round_up((width + blocks - 1) / blocks);
  if (longest > least + SHARING) {  // lanes try how many tiles a part should have at least
    const int step = round_up(least / 30 + 1), tried = least + lane * step;
    const float by = reciprocal(tried);
    int needed = 0, row = 0;
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      const int own = load(first), last = min(all.count - first, 32);
#pragma unroll 4
      for (int i = 0; i < last; ++i) {
        const int count = __shfl_sync(~0u, own, i), tiles = __shfl_sync(~0u, its.cost, i);
        needed += tiles >= tried ? count * divide_up(tiles, tried, by) : 0;
        row += tiles >= tried ? 0 : count * (tiles + EXTRA);
      }
    }
    const u32 fits = __ballot_sync(~0u, needed + divide_up(row, tried, by) <= blocks);
    if (fits) each = least + (__ffs(fits) - 1) * step;
  }
  float by = reciprocal(each);
  const auto parts_of = [&] { return its.cost >= each ? divide_up(its.tiles, each, by) : 0; };
#pragma unroll 1
  while (each <= longest) {
    int row = 0, shorter = 1;
#pragma unroll 1
    for (int first = 0; first < all.count; first += 32) {
      const int count = load(first), own = parts_of();
      parts += __reduce_add_sync(~0u, count * own);
      entries += __reduce_add_sync(~0u, own > 0 ? count * its.entries(own) : 0);
      row += __reduce_add_sync(~0u, count > 0 && own == 0 ? count * (its.tiles + EXTRA) : 0);
      shorter = max(shorter, __reduce_max_sync(~0u, own == 0 ? its.cost : 0));
    }
    if (parts + (row > 0) <= blocks && blocks + entries <= room) {
      width = row, ranges = min(blocks - parts, row / (shorter + EXTRA));
      break;
    }
    parts = entries = 0, each += each, by = reciprocal(each);
  }
  ranges = max(ranges, 1);
  const auto border = [&](int nth) { return int((long long)width * max(min(nth, ranges), 0) / ranges); };
  const int own = int(blockIdx.x) - parts, end = border(own + 1);
  if (lane == 0) {
    range.begin = border(own), range.end = end, range.longest = each;
    place.count = 0;
  }
  __syncwarp();
  int before = 0, parts_before = 0, entries_before = 0;
#pragma unroll 1
  for (int first = 0; first < all.count; first += 32) {
    const int count = load(first), times = parts_of(), its_width = count > 0 && times == 0 ? count * (its.tiles + EXTRA) : 0;
    const int its_end = before + sum_to_here(its_width);
    if (own >= 0 && its_end - its_width < end && end <= its_end) {
      range.request = first + lane, range.base = its_end - its_width;
    }
    before = __shfl_sync(~0u, its_end, 31);
    if (parts == 0) continue;
    const int entry = times > 0 ? its.entries(times) : 0;
    const int last = parts_before + sum_to_here(count * times), last_entry = entries_before + sum_to_here(count * entry);
    const int nth = int(blockIdx.x) - (last - count * times);
    const u32 found = __ballot_sync(~0u, 0 <= nth && nth < count * times);
    const int rows = times > 0 ? nth / times : 0;
    if (found) place.put(its, __ffs(found) - 1, first + lane, rows, nth - rows * times, times);
    if (found >> lane & 1) {
      place.first_entry = blocks + last_entry - (count - rows) * entry;
      place.counter = (blocks + last - (count - rows) * times) * FLAG_STEP;
    }
    parts_before = __shfl_sync(~0u, last, 31), entries_before = __shfl_sync(~0u, last_entry, 31);
  }
}

DEVICE void bring_range(const Tiles& shared, u8* memory, const Requests& all, const KV_TYPE::Storage* cache,
                        const int* block_tables) {
  const volatile Range& range = *(const volatile Range*)(memory + RANGE_AT);
  Bringer bringer(shared);
  Contexts at;
  at.start_at_end(all, range);
#pragma unroll 1
  do {
    bringer.aim(cache, at.nth % HEADS, block_tables + (long long)at.request * all.table_stride, at.limit);
    bringer.bring(at.share(range), at.limit, max(min(at.keys - at.tokens, at.limit), 0) / KEYS);
  } while (at.advance(all, range));
}

// What has been merged of a context's beginning.
DEVICE void load_merged(const Part& part, State& all) {
  const int thread = thread_from_here() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(row_of(r), part.rows - 1);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float4 x = __ldcg(part.entries.record(0, row, i, thread));
      float* to = &all.acc[8 * i + 2 * r];
      to[0] = x.x, to[1] = x.y, to[4] = x.z, to[5] = x.w;
    }
    const float2 its = __ldcg(&part.entries.state(0, row));
    all.largest[r] = its.x, all.total[r] = its.y;
  }
}

// It is handed over by a flag, which is zero before and after. Who waits has a greater number, so all that it waits for have
// started.
DEVICE void tell_next(int* flag) {
  meet_computing();
  if (threadIdx.x == THREADS) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
DEVICE void wait_for_beginning(int* flag) {
  if (threadIdx.x == THREADS) {
    int is_there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
    } while (!is_there);
    *flag = 0;
  }
  meet_computing();
}

DEVICE void attend_range(const Tiles& shared, u8* memory, const Requests& all_requests, const MODEL_TYPE::Storage* q,
                         const float* v_scale, const float* out_scale, OUT_TYPE::Storage* out, const int* position_ids,
                         float* partial, int room, int* flags, float scale) {
  const volatile Range& range = *(const volatile Range*)(memory + RANGE_AT);
  const int block_tokens = all_requests.block_tokens, entry_rows = block_tokens * GROUP;
  const auto entries_of = [&](int nth) {  // what thread block nth hands over
    Entries its;
    its.rows = entry_rows, its.first_unit = 0;
    its.sums = partial + (long long)nth * entry_rows * SIZE;
    its.states = (float2*)(partial + (long long)room * entry_rows * SIZE) + nth * entry_rows;
    return its;
  };
  Contexts at;
  at.start_at_end(all_requests, range);
  u32 parity = 0;
#pragma unroll 1
  do {
    const Share share = at.share(range);
    if (share.begin >= share.end) continue;
    const int first_token = at.nth / HEADS * block_tokens;
    Part part;
    part.head = at.nth % HEADS, part.token = at.start + first_token;
    part.rows = min(block_tokens, at.tokens - first_token) * GROUP;
    part.merges = true;
    meet_computing();  // the queries before have been read
    int last_key[2];
    const int full_tiles = part.load_positions(position_ids, at.limit, last_key);
    stage_queries(shared.queries(0), q, part);
    meet_computing();
    const Queries<false> queries(shared.queries(0));
    State all, unit;
    if (share.begin > 0) {
      part.entries = entries_of(blockIdx.x - 1);
      wait_for_beginning(flags + (blockIdx.x - 1) * FLAG_STEP);
      load_merged(part, all);
    } else {
      all.clear();
    }
    attend_share(shared, share, part, queries, full_tiles, last_key, scale, -1, parity, all, unit);
    if (share.end < at.tiles) {
      part.entries = entries_of(blockIdx.x);
      store_entry(part, 0, all, all.weighed());
      tell_next(flags + blockIdx.x * FLAG_STEP);
    } else {
      const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
      const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
      write_merged(all, part, out, value_scale, quanta);
    }
  } while (at.advance(all_requests, range));
}

// How a thread block of the binary for many requests processes its range, or its share of a longer context (ranges.cuh):
// producer warps load the tiles of one context after another, the others attend to them.
#pragma once

#include "ops/paged_attention/long/merge.cuh"
#include "ops/paged_attention/long/hand_over.cuh"
#include "ops/paged_attention/long/ranges.cuh"

constexpr int RANGE_AT = PLACE_AT + sizeof(Place);
static_assert(RANGE_AT + sizeof(Range) <= SHARED_BYTES, "room for all of it");

// What those who compute need again when they have attended to a context, or seldom before: all their registers are used then.
struct Kept {
  volatile int request, nth, base, start, tokens, keys, limit, tiles, head, token, rows;
  volatile int end;
  volatile int last_keys[64];

  DEVICE void put(const Contexts& at, const Part& part, const Seen& seen) {
    if (threadIdx.x == THREADS) {
      request = at.request, nth = at.nth, base = at.base, start = at.start, tokens = at.tokens, keys = at.keys;
      limit = at.limit, tiles = at.tiles, head = part.head, token = part.token, rows = part.rows;
      end = seen.end;
    }
    if (threadIdx.x % 4 == 0) last_keys[row_of(0)] = seen.last_key[0], last_keys[row_of(1)] = seen.last_key[1];
  }
  DEVICE void take(Contexts& at, Part& part) const {
    at.request = request, at.nth = nth, at.base = base, at.start = start, at.tokens = tokens, at.keys = keys;
    at.limit = limit, at.tiles = tiles, part.head = head, part.token = token, part.rows = rows;
  }
  struct LastKeys {
    const Kept& all;
    DEVICE int operator[](int r) const { return all.last_keys[row_of(r)]; }
  };
  struct ItsSeen {  // as Seen
    int end, full_tiles;
    LastKeys last_key;
  };
};
constexpr int KEPT_AT = RANGE_AT + sizeof(Range);
static_assert(KEPT_AT + sizeof(Kept) <= SHARED_BYTES, "room for all of it");

DEVICE void bring_range(const Tiles& shared, u8* memory, const Requests& all, const KV_TYPE::Storage* cache,
                        const int* block_tables) {
  const volatile Range& range = *(const volatile Range*)(memory + RANGE_AT);
  Bringer bringer(shared);
  Contexts at;
  at.start_at_end(range);
#pragma unroll 1
  do {
    bringer.aim(cache, at.nth % HEADS, block_tables + (long long)at.request * all.table_stride, at.limit);
    bringer.bring(at.share(range), at.limit, max(min(at.keys - at.tokens, at.limit), 0) / KEYS);
  } while (at.advance(all, range));
}

// What has been merged of a context's beginning.
DEVICE void load_merged(const Entries& from, int rows, State& all) {
  const int thread = thread_from_here() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(row_of(r), rows - 1);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float4 x = __ldcg(from.record(0, row, i, thread));
      float* to = &all.acc[8 * i + 2 * r];
      to[0] = x.x, to[1] = x.y, to[4] = x.z, to[5] = x.w;
    }
    const float2 its = __ldcg(&from.state(0, row));
    all.largest[r] = its.x, all.total[r] = its.y;
  }
}

// As `store_entry`, by registers of which there are none to spare: pairs are stored from where they are. `states`: behind the
// sums, in numbers.
DEVICE void store_in_loop(float* partial, u32 entry, int entry_rows, u32 states, int rows, const State& its,
                          const State::Weighed& weighed) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r), thread = thread_from_here() % 4;
    if (row >= rows) continue;
    const u32 nth = entry * entry_rows + row;
    float* to = partial + (nth * SIZE + thread * 4);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      const float* x = &its.acc[4 * i + 2 * r];
      __stcg((float2*)(to + i / 2 * 16 + i % 2 * 2), make_float2(x[0], x[1]));
    }
    if (thread == 0) __stcg((float2*)(partial + states) + nth, make_float2(weighed.largest[r], weighed.total[r]));
  }
}

// Ranges and shares of contexts have one loop: with a second one, which most steps do not run, the first was 1 to 2 % slower.
// Whether others share the context: then `all` is what the thread block has merged of it, and the rest is still to do.
DEVICE bool attend_range(const Tiles& shared, u8* memory, const Requests& all_requests, const MODEL_TYPE::Storage* q,
                         const float* v_scale, const float* out_scale, OUT_TYPE::Storage* out, const int* position_ids,
                         float* partial, int room, int* flags, float scale, Part& shared_part, State& all) {
  const volatile Range& range = *(const volatile Range*)(memory + RANGE_AT);
  const volatile Place& place = *(const volatile Place*)(memory + PLACE_AT);
  const int block_tokens = all_requests.block_tokens, entry_rows = block_tokens * GROUP;
  const auto entries_at = [&](int nth) {  // what thread block nth hands over, or others merge
    Entries its;
    its.rows = entry_rows, its.first_unit = 0;
    its.sums = partial + (long long)nth * entry_rows * SIZE;
    its.states = (float2*)(partial + (long long)room * entry_rows * SIZE) + nth * entry_rows;
    return its;
  };
  // The same memory, as gridDim.z is 1. The compiler cannot know that, so the loop has operands' addresses as it would alone.
  const auto again = [&] { return memory + (gridDim.z - 1) * 16; };
  const auto kept = [&]() -> Kept& { return *(Kept*)(again() + KEPT_AT); };
  Contexts at;
  at.start_at_end(range);
  u32 parity = 0;
#pragma unroll 1
  do {
    const Share share = at.share(range);
    if (share.begin >= share.end) continue;
    const int first_token = at.nth / HEADS * block_tokens;
    Part part;
    part.head = at.nth % HEADS, part.token = at.start + first_token;
    part.rows = min(block_tokens, at.tokens - first_token) * GROUP;
    meet_computing();  // the queries before have been read, and what was kept
    Seen seen;
    seen.end = share.end, seen.full_tiles = part.load_positions(position_ids, at.limit, seen.last_key);
    kept().put(at, part, seen);
    stage_queries(shared.queries(0), q, part);
    meet_computing();
    const Queries queries(shared.queries(0));
    State unit;
    if (share.begin > 0 && place.count == 0) {
      wait_for_beginning(flags + (blockIdx.x - 1) * FLAG_STEP);
      load_merged(entries_at(blockIdx.x - 1), part.rows, all);
    } else {
      all.clear();
    }
    unit.clear_states();
    const bool merges = place.count == 0 || place.nth == 0;
    const auto finish = [&](int nth, State& to, const State& its, const State::Weighed& weighed) {
      if (merges) {
        append(to, its, weighed);
      } else {
        const volatile Place& its_place = *(const volatile Place*)(again() + PLACE_AT);
        const int entry = its_place.first_entry + nth - its_place.first_unit + 1;
        store_in_loop(partial, entry, entry_rows, room * entry_rows * SIZE, kept().rows, its, weighed);
      }
    };
    const Kept::ItsSeen its_seen = {seen.end, seen.full_tiles, {kept()}};
    attend_share(shared, share.first_unit, its_seen, part.rows, queries, scale, -1, parity, all, unit, finish);
    kept().take(at, part);
    if (place.count > 0) {
      shared_part = part, shared_part.merges = place.nth == 0;
      shared_part.entries = entries_at(place.first_entry), shared_part.entries.first_unit = place.first_unit;
      return true;
    }
    if (kept().end < at.tiles) {
      Part own = part;
      own.entries = entries_at(blockIdx.x);
      store_entry(own, 0, all, all.weighed());
      tell_next(flags + blockIdx.x * FLAG_STEP);
    } else {
      const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
      const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
      write_merged(all, part, out, value_scale, quanta);
    }
  } while (at.advance(all_requests, range));
  return false;
}

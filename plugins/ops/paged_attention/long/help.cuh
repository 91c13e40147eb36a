// A thread block that helps two contexts with their beginnings (Place::put_helped): it stores work items of both, one
// context after the other, and merges nothing. This is separate code, because a loop around the other blocks' code would
// cost them registers.
#pragma once

#include "ops/paged_attention/long/merge.cuh"
#include "ops/paged_attention/long/shares.cuh"

constexpr int PLACE_AT = (Tiles::BYTES + 15) / 16 * 16;
static_assert(PLACE_AT + sizeof(Place) <= SHARED_BYTES, "room for all of it");

#if !TREE && !ALONE
DEVICE void help(const Tiles& shared, const Place& placed, const MODEL_TYPE::Storage* q, const int* position_ids,
                 float* partial, int* counters, float scale, int block_tokens, int max_entries) {
  const volatile Place& place = placed;  // read again for each context
  const int warpgroup = WARPGROUPS > 1 && __any_sync(~0u, threadIdx.x >= 2 * THREADS);
  u32 parity = 0;
#pragma unroll 1
  for (int nth = 0; nth < 2; ++nth) {
    const int rows = place.rows + nth, entry_rows = block_tokens * GROUP, start = place.context.numbers.start;
    Part part;
    part.head = rows, part.token = start, part.merges = false;
    part.rows = min(block_tokens, place.context.numbers.end - start) * GROUP;
    const long long entry = place.first_entry + nth * max_entries;
    part.entries.rows = entry_rows, part.entries.first_unit = place.first_unit;
    part.entries.sums = partial + entry * entry_rows * SIZE;
    part.entries.states = (float2*)(partial + (long long)HEADS * max_entries * entry_rows * SIZE) + entry * entry_rows;
    Seen seen = {place.share.end, 0, {0, 0}};
    seen.full_tiles = part.load_positions(position_ids, place.context.limit, seen.last_key);
    stage_queries(shared.queries(warpgroup), q, part);
    meet_computing();
    const Queries queries(shared.queries(warpgroup));
    State all, unit;
    unit.clear_states();
    const auto store = [&](int its, State&, const State& state, const State::Weighed& weighed) {
      store_entry(part, part.entries.of(its), state, weighed);
    };
    attend_share(shared, place.share.first_unit, seen, part.rows, queries, scale, -1, parity, all, unit, store);
    pass_shares(counters + place.counter + nth * 32);
  }
}
#endif

// The compute warpgroups of long.cu: they attend to a share's tiles, 64 rows each, and merge or store every work item
// (`unit`).
#pragma once

#include "ops/paged_attention/long/queries.cuh"

static_assert(STAGES == 2, "a slot is the first or the second");
// Where what others merge of a block of rows is stored (an entry): first what the thread block with the beginning has merged,
// then the work items behind its share. Of each row its sums and its state.
//
// The sums of 16 dimensions are in the order in which a thread of a product has them: four threads' dimensions 2 t,
// 2 t + 1, and those 8 further.
struct Entries {
  float* sums;     // [entries, STEPS, rows, 16]
  float2* states;  // [entries, rows]: largest, total
  int rows;
  int first_unit;  // of the second entry

  DEVICE int of(int unit) const { return unit - first_unit + 1; }
  DEVICE float4* record(int entry, int row, int block, int thread) const {
    return (float4*)(sums + ((long long)entry * rows + row) * SIZE) + block * 4 + thread;
  }
  DEVICE float2& state(int entry, int row) const { return states[entry * rows + row]; }
};

// What a thread block computes: some tokens of one request, for one KV head.
struct Part {
  int head, token, rows;  // the first of the step's tokens
  Entries entries;
  bool merges;  // the context's beginning

  // The last key that each of the thread's rows sees; how many tiles all rows see wholly.
  DEVICE int load_positions(const int* position_ids, int limit, int (&last_key)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(r), rows - 1);
      last_key[r] = min(load_int(position_ids + token + row / GROUP), limit - 1);
    }
    return min(load_int(position_ids + token) + 1, limit) / KEYS;
  }
};

// Queries of a warpgroup's 64 rows as a left operand; zeros for missing rows. By its threads.
DEVICE void stage_queries(u32 target, const MODEL_TYPE::Storage* q, const Part& part) {
  constexpr int PER_ROW = SIZE / 8, ROW_STEP = 128 / PER_ROW;
  const int thread = threadIdx.x % 128, piece = thread % PER_ROW;
  const int first_row = (threadIdx.x - THREADS) / 128 * 64;
#pragma unroll
  for (int i = 0; i < 64 / ROW_STEP; ++i) {
    const int row = thread / PER_ROW + i * ROW_STEP, its = first_row + row;
    const long long token = part.token + its / GROUP;
    uint4 x = {0, 0, 0, 0};
    if (its < part.rows) {
      x = __ldcg((const uint4*)(q + (token * HEADS + part.head) * (GROUP * SIZE) + its % GROUP * SIZE + piece * 8));
    }
    store_shared(target + piece / 8 * HALF_BYTES + row * 128 + ((piece % 8 ^ (row & 7)) << 4),
                 to_inner(x.x), to_inner(x.y), to_inner(x.z), to_inner(x.w));
  }
  shared_fence();
}

DEVICE void store_entry(const Part& part, int entry, const State& its, const State::Weighed& weighed) {
  const int thread = thread_from_here() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    if (row >= part.rows) continue;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float* x = &its.acc[8 * i + 2 * r];
      __stcg(part.entries.record(entry, row, i, thread), make_float4(x[0], x[1], x[4], x[5]));
    }
    if (thread == 0) {
      __stcg(&part.entries.state(entry, row), make_float2(weighed.largest[r], weighed.total[r]));
    }
  }
}

// A work item that is complete: merged with what is left of it, or stored.
DEVICE void finish_unit(const Part& part, int unit, State& all, const State& its,
                        const State::Weighed& weighed) {
  if (part.merges) {
    append(all, its, weighed);
  } else {
    store_entry(part, part.entries.of(unit), its, weighed);
  }
}

// Totals of which two of a row's four lanes know each: of a thread's first row lanes 0 and 1, of the second lanes 2 and 3.
// A tile's sums are exchanged by two shuffles then, not four, where shared memory is busy, through which they go. One
// warpgroup is 3 % slower so where there is one request, whose context is shared.
struct OwnTotals {
  static constexpr bool ARE_USED = ALONE || WARPGROUPS > 1;
  bool is_second;

  DEVICE OwnTotals() {
    u32 lane = threadIdx.x & 2;
    asm volatile("" : "+r"(lane));  // kept
    is_second = lane != 0;
  }
  // The same numbers, added in the same order, as by `Softening::add_weights`; the own total is the first.
  DEVICE void add_weights(const Softening& its, State& state) const {
    const float given = is_second ? its.sum[0] : its.sum[1], kept = is_second ? its.sum[1] : its.sum[0];
    const float two = __fadd_rn(kept, __shfl_xor_sync(~0u, given, 2));
    const float four = __fadd_rn(two, __shfl_xor_sync(~0u, two, 1));
    state.total[0] = __fmaf_rn(state.total[0], is_second ? its.fade[1] : its.fade[0], four);
  }
  // Tells the four lanes both totals.
  DEVICE void share(float (&total)[2]) const {
    const float own = total[0], other = __shfl_xor_sync(~0u, own, 2);
    total[0] = is_second ? other : own, total[1] = is_second ? own : other;
  }
};

// A share's tiles end at `end`; from full_tiles on, a thread's rows see keys up to last_key only.
struct Seen {
  int end, full_tiles, last_key[2];
};

// Attends to a share's tiles, of which there is one at least, for a thread block with so many rows. finish(unit, all, its, weighed)
// merges a work item with `all` or stores it. Work item `held` is not finished: it is left in `unit`, which has no state at first.
// Whether there was one. `parity`: of the keys' slots, the first of which has the first tile.
template <class ItsSeen, class Finish>
DEVICE bool attend_share(const Tiles& shared, int first_unit, const ItsSeen& keys, int rows, const Queries& queries, float scale,
                         int held, u32& parity, State& all, State& unit, const Finish& finish) {
  const bool is_idle = row_of(0) / 16 * 16 >= rows;  // the warp's rows are all missing
  Walk at;
  at.start(first_unit);
  float s[State::LOGITS];
  u32 weights[State::WORDS];
  Softening softening;
  const OwnTotals totals;
  const auto find_base = [&] {
    if (at.tile < keys.full_tiles) {
      softening.find_base<false>(unit, s, {}, scale);
    } else {
      int seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = keys.last_key[r] - at.tile * KEYS;
      softening.find_base<true>(unit, s, seen, scale);
    }
  };
  const auto weigh = [&] {
    softening.weigh(unit, s, weights, scale);
    if (OwnTotals::ARE_USED) {
      totals.add_weights(softening, unit);
    } else {
      softening.add_weights(unit);
    }
  };
  bool is_first = true;  // tile of its work item
  // Slots are constants, or chosen by a vote, which gives all lanes the same in a way that the compiler sees: descriptors
  // of operands are computed once a warp then.
  const auto multiply_keys = [&](bool odd) {
    barrier_wait(odd ? shared.full_keys(1) : shared.full_keys(0), parity);
    start_logits_in_turn(s, queries, odd ? shared.keys(1) : shared.keys(0));
  };
  const auto release_keys = [&](bool odd) {
    keep_order(s);
    release(odd ? shared.empty_keys(1) : shared.empty_keys(0));
  };
  const auto multiply_values = [&](bool odd, u32 its_parity) {
    barrier_wait(odd ? shared.full_values(1) : shared.full_values(0), its_parity);
    start_values(unit, weights, odd ? shared.values(1) : shared.values(0), !is_first);
  };
  const auto release_values = [&](bool odd) {
    unit.hold();
    release(odd ? shared.empty_values(1) : shared.empty_values(0));
  };
  // The keys of the next tile, which are in this slot, and the values of the one before, whose product may go on.
  const auto multiply = [&](bool odd) {
    const u32 before = parity;
    if (!odd) parity ^= 1;
    multiply_keys(odd);
    multiply_values(!odd, before);
    product_wait<1>();
    release_keys(odd);
  };
#pragma unroll
  for (int i = 0; i < State::WORDS; ++i) weights[i] = 0;
  multiply_keys(false);
  product_wait<0>();
  release_keys(false);
  if (!is_idle) {
    find_base();
    weigh();
  }
  int its = at.unit;
  bool odd = false;  // whether the last tile is in the second slot
  at.next();
#pragma unroll 1
  while (true) {
    // Tiles of the same work item of which all rows see all keys. Work items of several tiles begin with even ones, and so does
    // a share that has any.
    if (!odd && at.unit == its) {
      const int plain_end = min(min(at.unit_end, keys.end), keys.full_tiles);
      const auto attend_plain = [&](bool its_slot) {
        odd = its_slot;
        multiply(its_slot);
        is_first = false;
        if (!is_idle) softening.find_base<false>(unit, s, {}, scale);
        product_wait<0>();
        release_values(!its_slot);
        if (!is_idle) {
          softening.fade_values(unit);  // while exponentials are computed, of which a warp has one in eight cycles
          weigh();
        }
        ++at.tile;
      };
#pragma unroll 1
      while (at.tile < plain_end) {
        attend_plain(true);
        if (at.tile >= plain_end) break;
        attend_plain(false);
      }
      if (at.tile == at.unit_end) at.start(at.unit + 1);
    }
    if (at.tile >= keys.end) break;
    odd = __any_sync(~0u, !odd);
    multiply(odd);
    is_first = at.unit != its;
    auto weighed = unit.weighed();  // of the work item whose values are being added
    if (is_first) unit.clear_states();
    if (!is_idle) find_base();
    product_wait<0>();
    release_values(!odd);
    if (is_first) {
      if (OwnTotals::ARE_USED) totals.share(weighed.total);
      finish(its, all, unit, weighed);
      its = at.unit;
    }
    if (!is_idle) {
      weigh();
      if (!is_first) softening.fade_values(unit);
    }
    at.next();
  }
  odd = __any_sync(~0u, odd);
  multiply_values(odd, parity);
  product_wait<0>();
  release_values(odd);
  if (GOES_ON && !odd) {  // there is no tile for the second slot
    barrier_wait(shared.full_keys(1), parity);
    release(shared.empty_keys(1));
    barrier_wait(shared.full_values(1), parity);
    release(shared.empty_values(1));
  }
  parity ^= 1;
  if (OwnTotals::ARE_USED) totals.share(unit.total);
  if (its == held) return true;
  finish(its, all, unit, unit.weighed());
  return false;
}

// The warps of chunk.cu and tree.cu that compute 64 rows: they attend to tiles of keys, merge work items and store results.
#pragma once

#include "ops/paged_attention/chunk/load.cuh"
#include "ops/paged_attention/shared/output.cuh"
#include "ops/paged_attention/shared/unit_state.cuh"

// The row of an item that a thread holds in a product; the second is 8 further.
DEVICE int row_of(int r) {
  const int thread = thread_from_here();
  return (thread - THREADS) / 32 * 16 + thread % 32 / 4 + 8 * r;
}

// Appends a work item's values and states to what has been merged to the left of it.
DEVICE void append(State& all, const State& unit, const State::Weighed& weighed) {
  float left[2], right[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = fmaxf(all.largest[r], weighed.largest[r]), base = finite(top);
    left[r] = exp2(__fsub_rn(all.largest[r], base));
    right[r] = exp2(__fsub_rn(weighed.largest[r], base));
    all.total[r] = __fmaf_rn(all.total[r], left[r], __fmul_rn(weighed.total[r], right[r]));
    all.largest[r] = top;
  }
#pragma unroll
  for (int i = 0; i < OWN_SIZE / 2; ++i) {
    const int r = i / 2 % 2;
    all.acc[i] = __fmaf_rn(all.acc[i], left[r], __fmul_rn(unit.acc[i], right[r]));
  }
}

// Stores a row of FP8 numbers that four lanes have, each two of every eight dimensions (`pairs`). They exchange them, so
// that each stores 16 bytes at a time. The row is null where there is none.
DEVICE void store_bytes(u8* row, const u32 (&pairs)[OWN_SIZE / 8]) {
  const int lane = threadIdx.x % 4;
  const bool is_high = lane & 2, is_odd = lane & 1;
#pragma unroll
  for (int k = 0; k < OWN_SIZE / 8; k += 8) {
    u32 words[4];  // two times two numbers each; of four words a lane ends with that of its number of all lanes
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pairs[k + 2 * i] | pairs[k + 2 * i + 1] << 16;
    u32 halves[2][2];  // of lanes 0 and 1, of lanes 2 and 3: two words
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 given = __shfl_xor_sync(~0u, is_high ? words[i] : words[2 + i], 2);
      const u32 kept = is_high ? words[2 + i] : words[i];
      halves[0][i] = is_high ? given : kept, halves[1][i] = is_high ? kept : given;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 given = __shfl_xor_sync(~0u, is_odd ? halves[i][0] : halves[i][1], 1);
      const u32 kept = is_odd ? halves[i][1] : halves[i][0];
      words[2 * i] = is_odd ? given : kept, words[2 * i + 1] = is_odd ? kept : given;
    }
    constexpr u32 LOW = 0x5410, HIGH = 0x7632;  // of two words
    const uint4 y = {__byte_perm(words[0], words[1], LOW), __byte_perm(words[2], words[3], LOW),
                     __byte_perm(words[0], words[1], HIGH), __byte_perm(words[2], words[3], HIGH)};
    if (row) *(uint4*)(row + 8 * k + 16 * lane) = y;
  }
}

// Whether lanes exchange what they store. That of tree.cu, with one warpgroup, was not measured in a whole pass.
constexpr bool EXCHANGES = OUT_TYPE::bytes == 1 && WARPGROUPS > 1;

template <class Its>
DEVICE void store(const State& all, const Its& item, OUT_TYPE::Storage* out, float value_scale,
                  float quanta) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    if (!EXCHANGES && row >= item.rows) continue;  // else lanes without a row exchange, too
    const long long token = item.token + row / GROUP;
    OUT_TYPE::Storage* its = out + (token * HEADS + item.head) * (GROUP * SIZE) + row % GROUP * SIZE;
    [[maybe_unused]] OUT_TYPE::Storage* to = its + 2 * (threadIdx.x % 4);
    const float factor = __fdiv_rn(value_scale, all.total[r]);
    [[maybe_unused]] u32 pairs[OWN_SIZE / 8];
#pragma unroll
    for (int j = 0; j < OWN_SIZE / 8; ++j) {
      const float* x = &all.acc[4 * j + 2 * r];
      if constexpr (EXCHANGES) {
        pairs[j] = finish_pair(x[0], x[1], factor, quanta);
      } else {
        store_pair(to + 8 * j, finish_pair(x[0], x[1], factor, quanta));
      }
    }
    if constexpr (EXCHANGES) store_bytes(row < item.rows ? (u8*)its : nullptr, pairs);
  }
}

DEVICE void wait_for_operand(u32 barrier, u32 parity) {
  barrier_wait(barrier, parity);
  shared_fence();  // written by threads, read by tensor cores
}

DEVICE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Rings of keys and values as the computing warps read them.
struct Rings {
  Ring<STAGES> keys, values;
};

// Loads a warp's 16 rows of queries as left operands in registers: logits then ask half as much of shared memory.
DEVICE void load_queries(u32 (&queries)[STEPS][4], u32 operand) {
  const int thread = thread_from_here(), row = (thread - THREADS) / 32 % 4 * 16 + thread % 16;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int piece = 2 * i + thread % 32 / 16;
    const u32 at = operand + piece / 8 * HALF_BYTES + row * 128 + ((piece % 8 ^ (row & 7)) << 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(queries[i][0]), "=r"(queries[i][1]), "=r"(queries[i][2]),
                   "=r"(queries[i][3])
                 : "r"(at)
                 : "memory");
  }
}

// The first tile of what is appended to `all`: work items, or what another kernel has for them.
struct Units {
  static DEVICE int start(int unit) { return unit_start(unit); }
  static DEVICE bool has_own_base(int) { return true; }  // what begins with a tile
};

// Attends to tiles [0, tiles): `all` is what is merged of all work items but the last, `unit` the last one. From
// full_tiles on rows see keys up to last_key only. Queries are where `start_logits` finds them.
template <class Softening, class Its = Units, class Queries, class Scale, class Merged, class Unit>
DEVICE void attend(const Shared& shared, Rings& rings, const Queries& queries, int tiles, int full_tiles,
                   const int (&last_key)[2], const Scale& scale, Merged& all, Unit& unit) {
  auto& keys = rings.keys;
  auto& values = rings.values;
  float s[Unit::LOGITS];
  u32 weights[Unit::WORDS];
  Softening softening;
  const auto find_base = [&](int tile) {
    if (tile < full_tiles) {
      softening.template find_base<false>(unit, s, {}, scale);
    } else {
      int seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = last_key[r] - tile * KEYS;
      softening.template find_base<true>(unit, s, seen, scale);
    }
  };
  const auto weigh = [&] {
    softening.weigh(unit, s, weights, scale);
    softening.add_weights(unit);
  };
  bool is_first = true;  // tile of its work item
  const auto multiply_keys = [&] {
    barrier_wait(shared.full_keys(keys.slot), keys.parity);
    unit.hold_before_logits();
    start_logits(s, queries, shared.keys(keys.slot));
  };
  const auto release_keys = [&] {
    keep_order(s);
    release(shared.empty_keys(keys.slot));
    keys.advance();
  };
  const auto multiply_values = [&] {
    barrier_wait(shared.full_values(values.slot), values.parity);
    start_values(unit, weights, shared.values(values.slot), !is_first);
  };
  const auto release_values = [&] {
    unit.hold();
    release(shared.empty_values(values.slot));
    values.advance();
  };
  all.clear();
  unit.clear_states();
  int next_unit = 1, unit_end = Its::start(1);
  multiply_keys();
  product_wait<0>();
  release_keys();
  find_base(0);
  weigh();
#pragma unroll 1
  for (int tile = 1; tile < tiles; ++tile) {
    multiply_keys();
    multiply_values();
    product_wait<1>();
    release_keys();
    is_first = tile == unit_end;
    const auto weighed = unit.weighed();  // of the work item whose values are being added
    if (is_first) {
      if (Its::has_own_base(tile)) unit.clear_states();
      unit_end = Its::start(++next_unit);
    }
    find_base(tile);
    product_wait<0>();
    release_values();
    if (is_first) append(all, unit, weighed);
    weigh();
    if (!is_first) softening.fade_values(unit);
  }
  multiply_values();
  product_wait<0>();
  release_values();
}

// What chunk_fp8.cu has merged of a row: work items, and chains of products of the one that is not complete. It is in
// shared memory, for registers do not suffice.
#pragma once

#include "ops/paged_attention/chunk_fp8/products.cuh"

constexpr int MERGED_STEP = 128 * 16;                      // from four numbers of a thread to its next four
constexpr int MERGED_BYTES = 64 * SIZE * 4 + MERGED_STEP;  // of a warpgroup, at each of the two levels
static_assert(UNIT % CHAIN == 0, "work items are whole chains");
constexpr bool HAS_CHAINS = MOST_UNIT > CHAIN;  // else every chain is a work item, and there is one level
constexpr int LEVELS = 1 + HAS_CHAINS;

// Bases and sums of weights of a thread's two rows, and by what their sums are multiplied.
struct Level {
  float base[2], total[2], left[2], right[2];

  // What is stored at a place, or nothing, is merged with what is to its right.
  DEVICE void merge(u32 place, bool is_there, const float (&its_base)[2], const float (&its_total)[2]) {
    float x[4] = {minus_infinity(), minus_infinity(), 0.0f, 0.0f};
    if (is_there) load(x, place);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = fmaxf(x[r], its_base[r]);
      const float from = finite(base[r]);
      left[r] = exp2(__fsub_rn(x[r], from));
      right[r] = exp2(__fsub_rn(its_base[r], from));
      total[r] = __fmaf_rn(x[2 + r], left[r], __fmul_rn(its_total[r], right[r]));
    }
  }
  // And four of their sums.
  DEVICE void merge_sums(u32 place, bool is_there, float (&its)[4]) const {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (is_there) load(x, place);
#pragma unroll
    for (int k = 0; k < 4; ++k) its[k] = __fmaf_rn(x[k], left[k / 2], __fmul_rn(its[k], right[k / 2]));
  }
  static DEVICE void load(float (&x)[4], u32 place) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(place)
                 : "memory");
  }
  static DEVICE void store(u32 place, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
  }
};

struct Merged {
  u32 memory;
  int end;  // of the chain that is appended next

  DEVICE void clear() { end = CHAIN; }
  // Appends a chain with this base. Merging with nothing leaves what it is, so all have both levels. After the last chain
  // the sums of all are in `chain`, and the sums of weights in `total`.
  DEVICE void append(Fp8State& chain, const float (&base)[2], float (&total)[2], bool is_last) {
    u32 place = memory + (threadIdx.x / 128 - 1) * MERGED_BYTES + threadIdx.x % 128 * 16;
    const bool goes_on = HAS_CHAINS && !is_end(end - CHAIN), completes = !HAS_CHAINS || is_last || is_end(end);
    const bool follows = completes && end > UNIT;
    constexpr int FAR = WARPGROUPS * MERGED_BYTES;  // from work items to chains
    const u32 target = completes ? 0 : FAR;
    total[0] = chain.total(0), total[1] = chain.total(1);
    Level chains, items;
    if constexpr (HAS_CHAINS) {
      chains.merge(place + FAR, goes_on, base, total);
      items.merge(place, follows, chains.base, chains.total);
    } else {
      items.merge(place, follows, base, total);
    }
    if (!is_last) Level::store(place + target, {items.base[0], items.base[1], items.total[0], items.total[1]});
    total[0] = items.total[0], total[1] = items.total[1];
#pragma unroll
    for (int i = 0; i < SIZE / 2; i += 4) {
      place += MERGED_STEP;
      float x[4] = {chain.sums[i], chain.sums[i + 1], chain.sums[i + 2], chain.sums[i + 3]};
      if constexpr (HAS_CHAINS) chains.merge_sums(place + FAR, goes_on, x);
      items.merge_sums(place, follows, x);
      if (is_last) {
#pragma unroll
        for (int k = 0; k < 4; ++k) chain.sums[i + k] = x[k];
      } else {
        Level::store(place + target, x);
      }
    }
    end += CHAIN;
  }
  // Of a work item, or the beginning.
  static DEVICE bool is_end(int tile) { return unit_start(count_units(tile)) == tile; }
};

// What is appended: chains, of which all have the same length.
struct Chains {
  static DEVICE int start(int chain) { return chain * CHAIN; }
};

DEVICE void append(Merged& all, Fp8State& chain, const Fp8State::Weighed& weighed) {
  float total[2];
  all.append(chain, weighed.base, total, false);
}

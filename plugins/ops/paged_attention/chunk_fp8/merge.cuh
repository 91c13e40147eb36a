// The merged state of a row in chunk_fp8.cu: complete work items, and the chains of products of the current one. It is in
// shared memory, because there are not enough registers.
#pragma once

#include "ops/paged_attention/chunk_fp8/products.cuh"

constexpr int MERGED_STEP = 128 * 16;                      // from four numbers of a thread to its next four
constexpr int MERGED_BYTES = 64 * SIZE * 4 + MERGED_STEP;  // of a warpgroup, at each of the two levels
static_assert(UNIT % CHAIN == 0, "work items are whole chains");
constexpr bool HAS_CHAINS = MOST_UNIT > CHAIN;  // else every chain is a work item, and there is one level
constexpr int LEVELS = 1 + HAS_CHAINS;

// Four numbers of a thread at a place.
struct Four {
  float x[4];

  DEVICE void load(u32 place) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(place)
                 : "memory");
  }
  DEVICE void store(u32 place) const {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
  }
};

// Bases and sums of weights of a thread's two rows, and by what sums are multiplied that are stored and that follow.
struct Level {
  float base[2], total[2], left[2], right[2];

  // What follows, or what is stored at a place and then what follows.
  DEVICE void merge(u32 place, bool is_there, const float (&its_base)[2], const float (&its_total)[2]) {
    Four all = {{minus_infinity(), minus_infinity(), 0.0f, 0.0f}};
    if (is_there) all.load(place);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = fmaxf(all.x[r], its_base[r]);
      const float from = finite(base[r]);
      left[r] = exp2(__fsub_rn(all.x[r], from));
      right[r] = exp2(__fsub_rn(its_base[r], from));
      total[r] = __fmaf_rn(all.x[2 + r], left[r], __fmul_rn(its_total[r], right[r]));
    }
  }
  // The same of a chain and those of its work item before it, whose base has become the chain's.
  DEVICE void add(u32 place, bool is_there, const float (&its_base)[2], const float (&its_total)[2]) {
    Four item = {{minus_infinity(), minus_infinity(), 0.0f, 0.0f}};
    if (is_there) item.load(place);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = its_base[r];
      left[r] = exp2(__fsub_rn(item.x[r], finite(base[r])));
      total[r] = __fmaf_rn(item.x[2 + r], left[r], its_total[r]);
    }
  }
  DEVICE void merge_sums(u32 place, bool is_there, Four& its) const {
    Four all = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (is_there) all.load(place);
#pragma unroll
    for (int k = 0; k < 4; ++k) its.x[k] = __fmaf_rn(all.x[k], left[k / 2], __fmul_rn(its.x[k], right[k / 2]));
  }
  DEVICE void add_sums(u32 place, bool is_there, Four& its) const {
    Four item = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (is_there) item.load(place);
#pragma unroll
    for (int k = 0; k < 4; ++k) its.x[k] = __fmaf_rn(item.x[k], left[k / 2], its.x[k]);
  }
};

struct Merged {
  u32 memory;
  int end;  // of the chain that is appended next

  DEVICE void clear() { end = CHAIN; }
  // Appends a chain with this base. After the last one the sums of all are in `chain`, and the sums of weights in `total`.
  DEVICE void append(Fp8State& chain, const float (&base)[2], float (&total)[2], bool is_last) {
    const u32 items = memory + (threadIdx.x / 128 - 1) * MERGED_BYTES + threadIdx.x % 128 * 16;
    total[0] = chain.total(0), total[1] = chain.total(1);
    Level item;
    const u32 chains = items + WARPGROUPS * MERGED_BYTES;
    const bool goes_on = HAS_CHAINS && !is_unit(end - CHAIN), completes = !HAS_CHAINS || is_last || is_unit(end);
    if constexpr (HAS_CHAINS) item.add(chains, goes_on, base, total);
    if (!completes) {
      Four{{item.base[0], item.base[1], item.total[0], item.total[1]}}.store(chains);
#pragma unroll
      for (int i = 0; i < SIZE / 2; i += 4) {
        Four x = of(chain, i);
        item.add_sums(step(chains, i), goes_on, x);
        x.store(step(chains, i));
      }
      end += CHAIN;
      return;
    }
    const bool follows = end > UNIT;
    Level all;
    if constexpr (HAS_CHAINS) {
      all.merge(items, follows, item.base, item.total);
    } else {
      all.merge(items, follows, base, total);
    }
    if (!is_last) Four{{all.base[0], all.base[1], all.total[0], all.total[1]}}.store(items);
#pragma unroll
    for (int i = 0; i < SIZE / 2; i += 4) {
      Four x = of(chain, i);
      if constexpr (HAS_CHAINS) item.add_sums(step(chains, i), goes_on, x);
      all.merge_sums(step(items, i), follows, x);
      if (is_last) {
#pragma unroll
        for (int k = 0; k < 4; ++k) chain.sums[i + k] = x.x[k];
      } else {
        x.store(step(items, i));
      }
    }
    total[0] = all.total[0], total[1] = all.total[1];
    end += CHAIN;
  }
  // Whether a work item begins with a tile.
  static DEVICE bool is_unit(int tile) { return !HAS_CHAINS || unit_start(count_units(tile)) == tile; }

 private:
  static DEVICE Four of(const Fp8State& chain, int i) {
    return {{chain.sums[i], chain.sums[i + 1], chain.sums[i + 2], chain.sums[i + 3]}};
  }
  static DEVICE u32 step(u32 place, int i) { return place + (i / 4 + 1) * MERGED_STEP; }
};

// What is appended: chains, of which all have the same length.
struct Chains {
  static DEVICE int start(int chain) { return chain * CHAIN; }
  static DEVICE bool has_own_base(int tile) { return Merged::is_unit(tile); }
};

DEVICE void append(Merged& all, Fp8State& chain, const Fp8State::Weighed& weighed) {
  float total[2];
  all.append(chain, weighed.base, total, false);
}

// What a thread block has of a step (ranges.cuh), kept for the step's other layers: finding it takes 1 to 4 us, the time of
// one to four tiles, and every layer has the same lengths.
//
// A plan is kept together with all numbers that it follows from, and used only where these are the same. Launches overlap,
// so a thread block may read while another launch writes: each number is stored with the number of the write, in 8 bytes
// that are read and written at once, and a plan is used only if all of it is from one write.
#pragma once

#include "ops/paged_attention/long/ranges.cuh"

struct KeptPlan {
  typedef unsigned long long Numbered;  // a number, and in the higher half the number of its write
  static constexpr int LANES = 32, RANGE_WORDS = sizeof(Range) / 4, WORDS = RANGE_WORDS + sizeof(Place) / 4;
  static_assert(WORDS <= LANES, "a lane has one of them");

  Numbered* own;  // the last write's number; the plan; the step's numbers; starts, ends and keys of 32 requests after the other
  const Requests& all;
  int room, lane;
  bool fits;

  // plans: for each thread block `size` numbers.
  DEVICE KeptPlan(Numbered* plans, int size, const Requests& all_, int room_)
      : own(plans + (long long)blockIdx.x * size), all(all_), room(room_), lane(lane_id()) {
    fits = 1 + (2 + 3 * ((all.count + LANES - 1) / LANES)) * LANES <= size;
  }
  DEVICE Numbered* of_plan() const { return own + 1 + lane; }
  DEVICE Numbered* of_step() const { return own + 1 + LANES + lane; }
  DEVICE Numbered* of_requests(int first) const { return own + 1 + 2 * LANES + 3 * first + lane; }

  DEVICE static Numbered load(const Numbered* from) {
    Numbered x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
  }
  DEVICE static void store(Numbered* to, u32 write, int x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((Numbered)write << 32 | u32(x)) : "memory");
  }
  DEVICE static int& word(Range& range, Place& place, int nth) {
    return nth < RANGE_WORDS ? ((int*)&range)[nth] : ((int*)&place)[nth - RANGE_WORDS];
  }
  DEVICE int step_number() const {
    const int its[] = {all.count, all.table_stride, all.block_tokens, all.max_tokens, room, int(gridDim.x)};
    int x = 0;
#pragma unroll
    for (int i = 0; i < 6; ++i) x = lane == i ? its[i] : x;
    return x;
  }
  DEVICE Numbers load_request(int first) const {
    return first + lane < all.count ? all.load(first + lane) : Numbers{0, 0, 0};
  }

  // Whether there is a plan for this step, which is then the block's.
  DEVICE bool take(Range& range, Place& place) const {
    if (!fits) return false;
    const Numbered its = load(of_plan()), step = load(of_step());
    u32 others = 0;  // bits in which a number is another one than the step's, or of another write
    const u32 write = __shfl_sync(~0u, u32(its >> 32), 0);
    const auto compare = [&](Numbered x, int wanted) { others |= u32(x >> 32) ^ write | u32(x) ^ u32(wanted); };
    compare(step, step_number());
    others |= u32(its >> 32) ^ write;
#pragma unroll 2
    for (int first = 0; first < all.count; first += LANES) {
      const Numbered* from = of_requests(first);
      const Numbered start = load(from), end = load(from + LANES), limit = load(from + 2 * LANES);
      const Numbers request = load_request(first);
      compare(start, request.start), compare(end, request.end), compare(limit, request.limit);
    }
    if (!__all_sync(~0u, write != 0 && others == 0)) return false;
    if (lane < WORDS) word(range, place, lane) = int(u32(its));
    return true;
  }
  DEVICE void put(Range& range, Place& place) const {
    if (!fits) return;
    __syncwarp();
    int write = 0;
    if (lane == 0) asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], 1;" : "=r"(write) : "l"((int*)own) : "memory");
    write = __shfl_sync(~0u, write, 0) + 1;
    store(of_plan(), write, lane < WORDS ? word(range, place, lane) : 0), store(of_step(), write, step_number());
#pragma unroll 1
    for (int first = 0; first < all.count; first += LANES) {
      const Numbers request = load_request(first);
      Numbered* to = of_requests(first);
      store(to, write, request.start), store(to + LANES, write, request.end), store(to + 2 * LANES, write, request.limit);
    }
  }
};

// What `find_range` finds, from the plan of this step if a layer before has kept one. By one warp.
DEVICE void plan_range(Range& range, Place& place, const Requests& all, int room, KeptPlan::Numbered* plans, int plan_size) {
  const KeptPlan kept(plans, plan_size, all, room);
  if (kept.take(range, place)) return;
  find_range(range, place, all, room);
  kept.put(range, place);
}

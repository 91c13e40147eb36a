// Attention of one request with few tokens in layers.cu. Groups of four warps (`team`) compute the work
// items (`unit`, see tiles.py) of one KV head each; then the work items of a head are merged from left to
// right, a slice of its rows in each of several blocks.
#pragma once

#include "fused/decoder_layers/attend_tiles.cuh"

namespace attention {

// Lanes that merge a pair of dimensions each, a power of two. Other lanes ask for the work items behind those that
// these have registers for, so a head's work items are all asked for at once.
constexpr int MERGE_LANES = SLICE_PAIRS > 16 ? 32 : SLICE_PAIRS > 8 ? 16 : 8;
constexpr int MERGE_PARTS = 32 / MERGE_LANES;
// Whether lanes compute what their work items are multiplied with side by side, before they add in turn. With two lanes
// and 8-bit weights that is not faster.
constexpr bool IS_SIDE_BY_SIDE = MXFP4 || MERGE_PARTS > 2;
// Work items of a lane: all of a head at once, if up to 12 do, for what is left over would be asked for behind them.
constexpr int ALL_AT_ONCE = (MAX_UNITS + MERGE_PARTS - 1) / MERGE_PARTS;
constexpr int AT_ONCE = !IS_SIDE_BY_SIDE ? 16 : ALL_AT_ONCE > 8 && ALL_AT_ONCE <= 12 ? ALL_AT_ONCE : 8;

// The work items merged so far.
struct Merged {
  float largest = minus_infinity(), total = 0.0f, a = 0.0f, b = 0.0f;

  DEVICE void add(const uint2& state, const uint2& sums) {
    const float its = __uint_as_float(state.x), top = fmaxf(largest, its), base = finite(top);
    const float left = exp2(__fsub_rn(largest, base)), right = exp2(__fsub_rn(its, base));
    largest = top;
    total = __fmaf_rn(total, left, __fmul_rn(__uint_as_float(state.y), right));
    a = __fmaf_rn(a, left, __fmul_rn(__uint_as_float(sums.x), right));
    b = __fmaf_rn(b, left, __fmul_rn(__uint_as_float(sums.y), right));
  }
  DEVICE void take_over(int lane) {
    largest = __shfl_sync(~0u, largest, lane), total = __shfl_sync(~0u, total, lane);
    a = __shfl_sync(~0u, a, lane), b = __shfl_sync(~0u, b, lane);
  }
  // The same as `add`, of what `weigh` left.
  DEVICE void add_weighed(const uint2& state, const uint2& sums) {
    const float left = __uint_as_float(state.x);
    total = __fmaf_rn(total, left, __uint_as_float(state.y));
    a = __fmaf_rn(a, left, __uint_as_float(sums.x));
    b = __fmaf_rn(b, left, __uint_as_float(sums.y));
  }
};

// Multiplies work items by the powers that they are added with, which depend on the largest logits of those before:
// `largest` of them. A work item's largest logit becomes what the sums before it are multiplied with.
DEVICE void weigh(uint2 (&states)[AT_ONCE], uint2 (&sums)[AT_ONCE], float largest) {
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    const float its = __uint_as_float(states[j].x), top = fmaxf(largest, its), base = finite(top);
    const float left = exp2(__fsub_rn(largest, base)), right = exp2(__fsub_rn(its, base));
    largest = top;
    states[j] = {__float_as_uint(left), __float_as_uint(__fmul_rn(__uint_as_float(states[j].y), right))};
    sums[j] = {__float_as_uint(__fmul_rn(__uint_as_float(sums[j].x), right)),
               __float_as_uint(__fmul_rn(__uint_as_float(sums[j].y), right))};
  }
}
// The largest logit of the lane's work items.
DEVICE float largest_of(const uint2 (&states)[AT_ONCE]) {
  float largest = __uint_as_float(states[0].x);
#pragma unroll
  for (int j = 1; j < AT_ONCE; ++j) largest = fmaxf(largest, __uint_as_float(states[j].x));
  return largest;
}

// Merges all work items of a head from left to right, by one warp.
DEVICE void merge_slice(const Step& s, const Exchange& x, int head, int slice, float value_scale,
                        float quanta, const int* arrived, int expected) {
  const int part = lane_id() / MERGE_LANES;  // of a lane's work items
#pragma unroll 1
  for (int first = MERGE_PARTS > 1 ? 0 : anew(lane_id()); first < SLICE_PAIRS; first += MERGE_LANES) {
    const int i = MERGE_PARTS > 1 ? first + anew(lane_id() % MERGE_LANES) : first;
    const int pair = slice * SLICE_PAIRS + i, row = pair / (SIZE / 2);
    const bool is_mine = i < SLICE_PAIRS && pair < PAIRS;
    if (MERGE_PARTS == 1 && !is_mine) continue;
    const int nth = pair % (SIZE / 2);
    // `StatePlace` pairs dimensions 16 i + 2 r and the next, or 16 i + r and the one 8 further.
    const int dim = IS_BYTE ? 2 * nth : nth / 8 * 16 + nth % 8, apart = IS_BYTE ? 1 : 8;
    const int at = ATTENDED_AT + row / GROUP * ATTENDED + (head * GROUP + row % GROUP) * SIZE + dim;
    const bool is_writer = is_mine && part == 0, has_row = is_mine && row < s.num_rows;
    // All threads have read what the previous layer left there.
    if (is_writer) {
      if (IS_BYTE) clear<2>(x, at);
      else clear<1>(x, at), clear<1>(x, at + apart);
    }
    u8 low = 0, high = 0;
    if (has_row || MERGE_PARTS > 1) {
      const u8* state = x.now + state_at(head, part * AT_ONCE) + row * 8;
      const u8* sum = x.now + sums_at(head, part * AT_ONCE) + (row * SIZE + 2 * nth) * 4;
      Merged merged;
      made(state), made(sum);  // while other values arrive
      Arrivals::ask(arrived, expected - EARLY_WARPS);
      const uint2 nothing = {__float_as_uint(minus_infinity()), NO_SUM};
#pragma unroll 1
      for (int unit = 0; unit < s.units; unit += AT_ONCE * MERGE_PARTS) {
        uint2 m[AT_ONCE], y[AT_ONCE];
        const u8 *states = state + unit * STATE_BYTES, *sums = sum + unit * SUMS_BYTES;
        int count = has_row ? s.units - unit - part * AT_ONCE : 0;
        u32 least;  // starting with the last one: all are requested before any is read
        do {
          // Keeps the compiler from computing all addresses and conditions before the first load.
          asm volatile("" : "+l"(states), "+l"(sums), "+r"(count));
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            const bool is_there = j < count;  // if not, its values change nothing
            m[j] = look8(states + j * STATE_BYTES, is_there, nothing);
            y[j] = look8(sums + j * SUMS_BYTES, is_there, {NO_SUM, NO_SUM});
          }
          least = ~0u;
#pragma unroll
          for (int j = AT_ONCE - 1; j >= 0; --j) {
            least = min(min(min(least, y[j].y), y[j].x), min(m[j].y, m[j].x));
          }
        } while (MERGE_PARTS > 1 ? __any_sync(~0u, least == 0) : least == 0);
        const int parts = min(MERGE_PARTS, (s.units - unit + AT_ONCE - 1) / AT_ONCE);
        if (IS_SIDE_BY_SIDE) {
          float largest = merged.largest;
          if (MERGE_PARTS > 1 && parts > 1) {
            const float own = largest_of(m);
#pragma unroll
            for (int p = 0; p < MERGE_PARTS; ++p) {
              const float its = __shfl_sync(~0u, own, p * MERGE_LANES + lane_id() % MERGE_LANES);
              merged.largest = fmaxf(merged.largest, its);
              if (p < part) largest = fmaxf(largest, its);
            }
          } else {
            merged.largest = fmaxf(merged.largest, largest_of(m));
          }
          weigh(m, y, largest);
        }
        // Every lane adds its own to what the lanes before have; the last ones with work items have it all.
#pragma unroll 1
        for (int p = 0; p < (MERGE_PARTS > 1 ? parts : 1); ++p) {
          if (p > 0) merged.take_over((p - 1) * MERGE_LANES + lane_id() % MERGE_LANES);
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            if (IS_SIDE_BY_SIDE) merged.add_weighed(m[j], y[j]);
            else merged.add(m[j], y[j]);
          }
        }
        if (MERGE_PARTS > 1 && parts > 1) merged.take_over((parts - 1) * MERGE_LANES + lane_id() % MERGE_LANES);
      }
      if (MERGE_PARTS > 1 && !is_writer) continue;
      if (has_row) {
        const float factor = __fdiv_rn(value_scale, merged.total);
        // + 0: no negative zeros
        const u32 two = MODEL_TYPE::pack_pair(__fmaf_rn(merged.a, factor, 0.0f), __fmaf_rn(merged.b, factor, 0.0f));
        const u16 out = E4M3::pack_pair(__fmul_rn(MODEL_TYPE::unpack(u16(two)), quanta),
                                        __fmul_rn(MODEL_TYPE::unpack(u16(two >> 16)), quanta));
        low = u8(out), high = u8(out >> 8);
      }
    }
    // Zeros for a padding token: other blocks wait for its values, too.
    if (IS_BYTE) put((u16*)(x.now + at), u16(inverted(low) | inverted(high) << 8));
    else give(x, at, low), give(x, at + apart, high);
  }
}

// The warp that merges: of the team that has no work item while the other has the block's last one.
DEVICE int merging_warp(int tasks) {
  return (tasks - int(blockIdx.x) + NUM_BLOCKS - 1) / NUM_BLOCKS % TEAMS * TEAM;
}

// With 4-bit weights `meanwhile` runs while queries, keys and values come.
template <class Meanwhile>
DEVICE void attend(const Step& s, const Exchange& x, const Layer* layer, const Shared& shared,
                   Arrivals& arrivals, int* heads, int& heads_expected, int nth_layer,
                   const Meanwhile& meanwhile) {
  const float scale =
      layer->k_scale ? __fmul_rn(s.softmax_scale, __ldg(layer->k_scale)) : s.softmax_scale;
  const int warp = MERGE_PARTS > 1 ? __shfl_sync(~0u, threadIdx.x / 32, 0) : threadIdx.x / 32;
  const int team = warp / TEAM, tasks = s.units * HEADS;
  const u32 slots = shared.tokens + team * (SLOTS * SLOT_BYTES);
  heads_expected += s.units * TEAM;
  Work work;
  if constexpr (MXFP4) {
    work = {};
    if (first_place() < tasks) work = Work(s, layer->cache, slots, task_at(first_place(), tasks), true);
    meanwhile();
  }
#pragma unroll 1
  for (int place = first_place(); place < MOST_TASKS; place += TEAMS * NUM_BLOCKS) {
    const int task = task_at(place, tasks);
    const bool is_first = IS_ONE_EACH || place == first_place();
    if (place < tasks) {
      if (!MXFP4 || !is_first) work = Work(s, layer->cache, slots, task, is_first);
      take_unit(s, x, arrivals, work, scale, shared, IS_FETCHED && is_first, nth_layer % 2);
      __syncwarp();
      if (lane_id() == 0) Arrivals::add(heads + 32 * work.head);
      StatePlace(x.now + x.other, work.head, work.unit).clear();
      if (!IS_ONE_EACH && place + TEAMS * NUM_BLOCKS < tasks) team_meet();  // the next work item's tiles are written there
    } else if (nth_layer == 0) {  // an earlier request may have had more work items
      StatePlace(x.now + x.other, task % HEADS, task / HEADS).clear();
    }
    if (IS_ONE_EACH) break;
  }
  if (warp == (TAKES_TWO && !LENDS ? merging_warp(tasks) : MERGER)) {
    const int head = blockIdx.x % HEADS, slice = blockIdx.x / HEADS;
    if (slice < SLICES) {
      const float value_scale = layer->v_scale ? __ldg(layer->v_scale) : 1.0f;
      const float quanta = __fdiv_rn(1.0f, __ldg(layer->attended_scale));
      merge_slice(s, x, head, slice, value_scale, quanta, heads + 32 * head, heads_expected);
      __syncwarp();
      if (lane_id() == 0) Arrivals::add(arrivals.counter);
    }
  }
  arrivals.expected += HEADS * SLICES;
  meet();  // the next product's tokens are written where keys and values were
}
}  // namespace attention
#if MAX_UNITS > 32
#include "fused/decoder_layers/attend_long.cuh"
#endif
#undef HEADS
#undef GROUP
#undef SIZE
#undef COLUMNS
#undef QUERY_BYTES
#undef UNIT

// Attention of one request with few tokens in layers.cu. Groups of four warps (`team`) compute the work
// items (`unit`, see tiles.py) of one KV head each; then the work items of a head are merged from left to
// right, a slice of its rows in each of several blocks.
#pragma once

#include "fused/decoder_layers/attend_unit.cuh"

namespace attention {

// Merges all work items of a head from left to right; each lane has a pair of dimensions.
DEVICE void merge_slice(const Step& s, const Exchange& x, int head, int slice, float value_scale,
                        float quanta, const int* arrived, int expected) {
#pragma unroll 1
  for (int i = anew(lane_id()); i < SLICE_PAIRS; i += 32) {
    const int pair = slice * SLICE_PAIRS + i, row = pair / (SIZE / 2);
    if (pair >= PAIRS) continue;
    const int nth = pair % (SIZE / 2);
    // `StatePlace` pairs dimensions 16 i + 2 r and the next, or 16 i + r and the one 8 further.
    const int dim = IS_BYTE ? 2 * nth : nth / 8 * 16 + nth % 8, apart = IS_BYTE ? 1 : 8;
    const int at = ATTENDED_AT + row / GROUP * ATTENDED + (head * GROUP + row % GROUP) * SIZE + dim;
    // All threads have read what the previous layer left there.
    if (IS_BYTE) clear<2>(x, at);
    else clear<1>(x, at), clear<1>(x, at + apart);
    u8 low = 0, high = 0;
    if (row < s.num_rows) {
      const u8* state = x.now + state_at(head, 0) + row * 8;
      const u8* sum = x.now + sums_at(head, 0) + (row * SIZE + 2 * nth) * 4;
      float largest = minus_infinity(), total = 0.0f, a = 0.0f, b = 0.0f;
      made(state), made(sum);  // while other values arrive
      Arrivals::ask(arrived, expected - EARLY_WARPS);
      const uint2 nothing = {__float_as_uint(minus_infinity()), NO_SUM};
      constexpr int AT_ONCE = 16;
#pragma unroll 1
      for (int unit = 0; unit < s.units; unit += AT_ONCE) {
        uint2 m[AT_ONCE], y[AT_ONCE];
        const u8 *states = state + unit * STATE_BYTES, *sums = sum + unit * SUMS_BYTES;
        int count = s.units - unit;
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
        } while (least == 0);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const float its = __uint_as_float(m[j].x), top = fmaxf(largest, its), base = finite(top);
          const float left = exp2(__fsub_rn(largest, base)), right = exp2(__fsub_rn(its, base));
          largest = top;
          total = __fmaf_rn(total, left, __fmul_rn(__uint_as_float(m[j].y), right));
          a = __fmaf_rn(a, left, __fmul_rn(__uint_as_float(y[j].x), right));
          b = __fmaf_rn(b, left, __fmul_rn(__uint_as_float(y[j].y), right));
        }
      }
      const float factor = __fdiv_rn(value_scale, total);
      // + 0: no negative zeros
      const u32 two = MODEL_TYPE::pack_pair(__fmaf_rn(a, factor, 0.0f), __fmaf_rn(b, factor, 0.0f));
      const u16 out = E4M3::pack_pair(__fmul_rn(MODEL_TYPE::unpack(u16(two)), quanta),
                                      __fmul_rn(MODEL_TYPE::unpack(u16(two >> 16)), quanta));
      low = u8(out), high = u8(out >> 8);
    }
    // Zeros for a padding token: other blocks wait for its values, too.
    if (IS_BYTE) put((u16*)(x.now + at), u16(inverted(low) | inverted(high) << 8));
    else give(x, at, low), give(x, at + apart, high);
  }
}

DEVICE void attend(const Step& s, const Exchange& x, const Layer* layer, const Shared& shared,
                   Arrivals& arrivals, int* heads, int& heads_expected, bool is_first_layer) {
  const float scale =
      layer->k_scale ? __fmul_rn(s.softmax_scale, __ldg(layer->k_scale)) : s.softmax_scale;
  const int warp = threadIdx.x / 32, team = warp / TEAM, tasks = s.units * HEADS;
  const u32 slots = shared.tokens + team * (SLOTS * SLOT_BYTES);
  heads_expected += s.units * TEAM;
#pragma unroll 1
  for (int task = first_task(); task < HEADS * MAX_UNITS; task += TEAMS * NUM_BLOCKS) {
    if (task < tasks) {
      Work work(s, layer->cache, slots, task);
      take_unit(s, x, arrivals, work, scale);
      __syncwarp();
      if (lane_id() == 0) Arrivals::add(heads + 32 * work.head);
      StatePlace(x.now + x.other, work.head, work.unit).clear();
      if (task + TEAMS * NUM_BLOCKS < tasks) team_meet();  // the next work item's tiles are written there
    } else if (is_first_layer) {  // an earlier request may have had more work items
      StatePlace(x.now + x.other, task % HEADS, task / HEADS).clear();
    }
  }
  if (warp == MERGER) {
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
#undef HEADS
#undef GROUP
#undef SIZE
#undef COLUMNS
#undef QUERY_BYTES
#undef UNIT

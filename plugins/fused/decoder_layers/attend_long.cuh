// Attention of one request with a long context in layers.cu. Its tiles come through the ring, behind the weights of QKV
// and ahead of those of the output projection (copy_tiles.cuh). All warps of a block merge a slice of a head: they ask
// for all of a head's work items at once, multiply them with their powers, and one or two warps add them in turn.
#pragma once

#include "fused/decoder_layers/attend_quads.cuh"

namespace attention {
// Pairs of dimensions of a slice, a power of two: they are of one row.
DEVICE constexpr int pairs_of_slice(int pairs) { return pairs >= SLICE_PAIRS ? pairs : pairs_of_slice(2 * pairs); }
constexpr int SLICED = pairs_of_slice(2), LONG_SLICES = PAIRS / SLICED, HALF_ROW = HEAD_SIZE / 2;
constexpr int UNIT_LANES = SLICED / 2, AT_A_TIME = WARPS * 32 / UNIT_LANES;  // lanes of a work item, which have 16 bytes each
constexpr int ROUNDS = (88 + AT_A_TIME - 1) / AT_A_TIME, BATCH = ROUNDS * AT_A_TIME;  // 88: of 32,768 tokens
constexpr int LANE_UNITS = BATCH / 32, ADDERS = SLICED > 16 ? SLICED / 16 : 1;  // warps that add
constexpr int RIGHTS_AT = 0, LEFTS_AT = RIGHTS_AT + WARPS * BATCH * 4, TOTALS_AT = LEFTS_AT + BATCH * 4;
constexpr int VALUES_AT = TOTALS_AT + BATCH * 4, VALUE_STRIDE = (BATCH + 4) * 4;
constexpr int VALUES_END = VALUES_AT + 2 * SLICED * VALUE_STRIDE;
// States are stored while other warps still attend.
constexpr int UNIT_STATES_AT = VALUES_END > TEAMS * TEAM_BYTES ? VALUES_END : TEAMS * TEAM_BYTES;
static_assert(!IS_LONG || UNIT_STATES_AT + BATCH * 8 <= ROOM, "room for what is merged");
static_assert(!IS_LONG || (HALF_ROW % SLICED == 0 && SLICED <= 32 && BATCH % 32 == 0), "a slice is of one row");

// Merges all work items of a head from left to right, by all warps of the block.
DEVICE void merge_long(const Step& s, const Exchange& x, const Shared& shared, int head, int slice, const Layer* layer) {
  const int lane = lane_id(), warp = threadIdx.x / 32;
  const float value_scale = layer->v_scale ? __ldg(layer->v_scale) : 1.0f;
  const float quanta = __fdiv_rn(1.0f, __ldg(layer->attended_scale));
  const int row = slice * SLICED / HALF_ROW, first_pair = slice * SLICED % HALF_ROW;
  const int value = threadIdx.x;  // that the thread adds up, if it is one of those
  const int nth = first_pair + value / 2;
  const int dim = IS_BYTE ? 2 * nth : nth / 8 * 16 + nth % 8, apart = IS_BYTE ? 1 : 8;
  const int at = ATTENDED_AT + row / GROUP * ATTENDED + (head * GROUP + row % GROUP) * SIZE + dim;
  const bool is_writer = value < 2 * SLICED && value % 2 == 0, has_row = row < s.num_rows;
  // All threads have read what the previous layer left there.
  if (is_writer) {
    if (IS_BYTE) clear<2>(x, at);
    else clear<1>(x, at), clear<1>(x, at + apart);
  }
  float total = 0.0f, sum = 0.0f, carried = minus_infinity();
  const u32 room = shared.tokens, rights = room + RIGHTS_AT + warp * (BATCH * 4);
#pragma unroll 1
  for (int first = 0; has_row && first < s.units; first += BATCH) {
    const int unit = warp * (32 / UNIT_LANES) + lane / UNIT_LANES;  // of the batch, and those AT_A_TIME further
    const u8* state = x.now + state_at(head, first + unit) + row * 8;
    const u8* sums = x.now + sums_at(head, first + unit) + (row * SIZE + 2 * first_pair) * 4 + lane % UNIT_LANES * 16;
    uint2 m[ROUNDS], y[ROUNDS][2];
    u32 least;
    do {
      least = ~0u;
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        const bool is_there = first + unit + r * AT_A_TIME < s.units;  // if not, its values change nothing
        m[r] = look8(state + r * (AT_A_TIME * STATE_BYTES), is_there, {__float_as_uint(minus_infinity()), NO_SUM});
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          y[r][i] = look8(sums + r * (AT_A_TIME * SUMS_BYTES) + i * 8, is_there, {NO_SUM, NO_SUM});
        }
      }
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        least = min(least, min(min(m[r].x, m[r].y), min(min(y[r][0].x, y[r][0].y), min(y[r][1].x, y[r][1].y))));
      }
    } while (least == 0);
    const u32 states = room + UNIT_STATES_AT;
    if (lane % UNIT_LANES == 0) {
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r) {
        store_two(states + (unit + r * AT_A_TIME) * 8, __uint_as_float(m[r].x), __uint_as_float(m[r].y));
      }
    }
    meet();
    // What sums before a work item and its own are multiplied with: a lane has a few work items that follow each other.
    float2 its[LANE_UNITS];
    float most = minus_infinity();
#pragma unroll
    for (int j = 0; j < LANE_UNITS; ++j) {
      its[j] = load_two(states + (lane * LANE_UNITS + j) * 8);
      most = fmaxf(most, its[j].x);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, most, step);
      if (lane >= step) most = fmaxf(most, other);
    }
    most = fmaxf(most, carried);
    float largest = __shfl_up_sync(~0u, most, 1);
    if (lane == 0) largest = carried;
    carried = __shfl_sync(~0u, most, 31);
#pragma unroll
    for (int j = 0; j < LANE_UNITS; ++j) {
      const int place = (lane * LANE_UNITS + j) * 4;
      const float top = fmaxf(largest, its[j].x), base = finite(top);
      const float left = exp2(__fsub_rn(largest, base)), right = exp2(__fsub_rn(its[j].x, base));
      largest = top;
      store_one(rights + place, right);
      if (warp > 0) continue;
      store_one(room + LEFTS_AT + place, left);
      store_one(room + TOTALS_AT + place, __fmul_rn(its[j].y, right));
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const int place = (unit + r * AT_A_TIME) * 4;
      const float right = load_one(rights + place);
      const u32 to = room + VALUES_AT + lane % UNIT_LANES * (4 * VALUE_STRIDE) + place;
      store_one(to, __fmul_rn(__uint_as_float(y[r][0].x), right));
      store_one(to + VALUE_STRIDE, __fmul_rn(__uint_as_float(y[r][0].y), right));
      store_one(to + 2 * VALUE_STRIDE, __fmul_rn(__uint_as_float(y[r][1].x), right));
      store_one(to + 3 * VALUE_STRIDE, __fmul_rn(__uint_as_float(y[r][1].y), right));
    }
    meet();
    if (value < 2 * SLICED) {
      const int end = min(s.units - first, BATCH) * 4;
      const u32 own = room + VALUES_AT + value * VALUE_STRIDE;
#pragma unroll 4
      for (int place = 0; place < end; place += 16) {
        const float4 left = load_four(room + LEFTS_AT + place), more = load_four(room + TOTALS_AT + place);
        const float4 added = load_four(own + place);
        total = __fmaf_rn(total, left.x, more.x), sum = __fmaf_rn(sum, left.x, added.x);
        total = __fmaf_rn(total, left.y, more.y), sum = __fmaf_rn(sum, left.y, added.y);
        total = __fmaf_rn(total, left.z, more.z), sum = __fmaf_rn(sum, left.z, added.z);
        total = __fmaf_rn(total, left.w, more.w), sum = __fmaf_rn(sum, left.w, added.w);
      }
    }
  }
  if (warp >= ADDERS) return;
  const float second = __shfl_xor_sync(~0u, sum, 1);
  if (!is_writer) return;
  u8 low = 0, high = 0;
  if (has_row) {
    const float factor = __fdiv_rn(value_scale, total);
    // + 0: no negative zeros
    const u32 two = MODEL_TYPE::pack_pair(__fmaf_rn(sum, factor, 0.0f), __fmaf_rn(second, factor, 0.0f));
    const u16 out = E4M3::pack_pair(__fmul_rn(MODEL_TYPE::unpack(u16(two)), quanta),
                                    __fmul_rn(MODEL_TYPE::unpack(u16(two >> 16)), quanta));
    low = u8(out), high = u8(out >> 8);
  }
  // Zeros for a padding token: other blocks wait for its values, too.
  if (IS_BYTE) put((u16*)(x.now + at), u16(inverted(low) | inverted(high) << 8));
  else give(x, at, low), give(x, at + apart, high);
}

// A team clears what it may store of work items of a head in the other exchange buffer.
DEVICE void clear_units(const Exchange& x, int head, int from, int to) {
  constexpr int ROWS = TOKENS * GROUP, PAIRS_OF_UNIT = ROWS * SIZE / 2;
  const int thread = threadIdx.x % (32 * TEAM);
  u8* half = x.now + x.other;
#pragma unroll 4
  for (int i = thread; i < (to - from) * PAIRS_OF_UNIT; i += 32 * TEAM) {
    put((uint2*)(half + sums_at(head, from + i / PAIRS_OF_UNIT) + i % PAIRS_OF_UNIT * 8), {0, 0});
  }
  for (int i = thread; i < (to - from) * ROWS; i += 32 * TEAM) {
    put((uint2*)(half + state_at(head, from + i / ROWS) + i % ROWS * 8), {0, 0});
  }
}

// `taken`: units of the ring so far.
DEVICE void attend_long(const Step& s, const Exchange& x, const Layer* layer, const Shared& shared, Arrivals& arrivals,
                        int* heads, int& heads_expected, int nth_layer, u32& taken) {
  const float scale = layer->k_scale ? __fmul_rn(s.softmax_scale, __ldg(layer->k_scale)) : s.softmax_scale;
  const int team = __shfl_sync(~0u, threadIdx.x / (32 * TEAM), 0);
  const Walk walk(s.tiles);
  heads_expected += walk.groups * TEAM;
  if (team < walk.count) {
    // All of a team's groups are of one head. The step's own tokens are in the last group, or in the last two, which other
    // blocks have.
    const int head = Walk::head(team), last = walk.count - 1 - (walk.count - 1 - team) % 2;
    Work work;
    work.head = head, work.tile = Walk::first(last), work.end = work.tile + GROUP_TILES;
    Queries queries;
    Fresh fresh(s, x, work, 0);
    if (warp_of_team() == 0) arrivals.wait_in_warp();
    team_meet();
    fresh.take(s, work, queries);
    const Told told(shared.tokens + team * TEAM_BYTES);
    OwnState state;
    state.clear();
    const auto quad_of = [&](int nth, int half) {
      return Quad(s, Walk::first(nth) + half * QUAD, taken + walk.order(nth, half) * QUAD_SLOTS);
    };
    const auto end_group = [&](int nth) {
      if (lane_id() == 0) Arrivals::add(heads + 32 * head);
      const int first = Walk::first(nth);
      clear_units(x, head, count_units(first + 1) - 1, count_units(min(first + GROUP_TILES, s.tiles)));
    };
    int nth = team;
#pragma unroll 1
    for (; nth < walk.count && Walk::first(nth) < 16; nth += TEAMS) {
#pragma unroll 1
      for (int half = 0; half < walk.quads(nth); ++half) {
        take_alone(s, x, shared, fresh, queries, head, quad_of(nth, half), scale);
      }
      end_group(nth);
    }
#pragma unroll 1
    for (; nth < walk.count; nth += TEAMS) {
#pragma unroll 1
      for (int half = 0; half < walk.quads(nth); ++half) {
        take_quad(s, x, shared, fresh, queries, told, state, head, quad_of(nth, half), scale);
      }
      end_group(nth);
    }
  }
  taken += walk.slots();
  if (nth_layer == 0) {  // an earlier request may have had more work items
#pragma unroll 1
    for (int i = s.units * HEADS + team * NUM_BLOCKS + blockIdx.x; i < MOST_TASKS; i += TEAMS * NUM_BLOCKS) {
      clear_units(x, i % HEADS, i / HEADS, i / HEADS + 1);
    }
  }
  const int head = blockIdx.x % HEADS, slice = blockIdx.x / HEADS;
  if (slice < LONG_SLICES) {
    if (threadIdx.x == 0) Arrivals::ask(heads + 32 * head, heads_expected - EARLY_WARPS);
    meet();
    merge_long(s, x, shared, head, slice, layer);
    __syncwarp();
    if (threadIdx.x / 32 < ADDERS && lane_id() == 0) Arrivals::add(arrivals.counter);
  }
  arrivals.expected += HEADS * LONG_SLICES * ADDERS;
  meet();  // the next product's tokens are written where weights and sums were
}
}  // namespace attention

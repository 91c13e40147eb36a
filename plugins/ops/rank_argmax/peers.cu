// The best id of each row of logits that ranks with a GPU each have shares of. A rank hands every other the best of
// each CHUNK of its ids, and all take the best of these: 8 bytes go over a link for 4 * CHUNK. meeting.cuh says how.
//
// A key is (order, 0x7fffffff - id): `order` compares as the logits do, where -0 equals 0 and NaN is above all, so
// the largest key is the largest logit's with the lowest id, in any order of comparing. None of its words is all
// ones, which meeting.cuh would change. A chunk of padding alone has the key 0, less than any other.
//
// Macros: RANKS, LEAVES (1), WIDTH (ids of a rank), OUT_WIDTH (ids in all), CHUNK.
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 256;  // as in kernel.py
constexpr int LANES = THREADS < 32 ? THREADS : 32;
constexpr int CHUNKS = (WIDTH + CHUNK - 1) / CHUNK, KEYS = RANKS * CHUNKS;  // of a row
constexpr int KEYS_A_LANE = (KEYS + LANES - 1) / LANES;
constexpr u32 NAN_ORDER = 0xfffffffe, LAST_ID = 0x7fffffff;
constexpr int VECTORS = CHUNK / (4 * LANES);  // of a lane
static_assert(WIDTH % 4 == 0 && CHUNK % (4 * LANES) == 0, "rows are whole vectors");

DEVICE u64 key_of(float x, int id) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  const u32 order = x != x ? NAN_ORDER : bits >> 31 ? ~bits : bits | 0x80000000u;
  return u64(order) << 32 | (LAST_ID - u32(id));
}

DEVICE u64 larger(u64 a, u64 b) { return a < b ? b : a; }

DEVICE u64 largest_of_warp(u64 key) {
  const u32 order = __reduce_max_sync(0xffffffffu, u32(key >> 32));
  const u32 id = u32(key >> 32) == order ? u32(key) : 0;
  return u64(order) << 32 | __reduce_max_sync(0xffffffffu, id);
}

// Of a chunk of this rank's share of a row, by the lanes of a warp: each compares its numbers as such, in the order of
// their ids, and makes a key of the first of the largest.
DEVICE u64 key_of_chunk(const float4* row, int chunk, int first_id, int lane) {
  const int first = chunk * CHUNK + 4 * lane;
  float4 x[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {  // all at once; behind the row its last ones, which are not looked at
    x[i] = row[min(first + 4 * LANES * i, WIDTH - 4) / 4];
  }
  __syncwarp();  // keeps the loads together, which the compiler would spread among comparisons
  float best = 0;
  int best_id = -1;
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = first + 4 * LANES * i, id = first_id + at;
    const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool is_there = at < WIDTH && id + c < OUT_WIDTH;
      const bool is_better = is_there && (best_id < 0 || values[c] > best);
      has_nan |= is_there && values[c] != values[c];
      best = is_better ? values[c] : best;
      best_id = is_better ? id + c : best_id;
    }
  }
  if (has_nan) best = __uint_as_float(0x7fc00000u);
  return largest_of_warp(best_id < 0 ? 0 : key_of(best, best_id));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    best_ids(const long long* bases, State* state, int* lost, const float4* x, int* out,
             int stride, int offset, int rank, int rows, long long slot_bytes, long long limit_ns) {
  launch_dependents();
  Meeting meeting(bases, lost, rank, slot_bytes, limit_ns);
  wait_for_dependencies();
  meeting.half = half_of(read_begun(state));
  const int lane = threadIdx.x % LANES, warps = gridDim.x * (THREADS / LANES);
  const int warp = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
#pragma unroll 1
  for (int i = warp; i < rows * CHUNKS; i += warps) {
    const float4* row = x + (long long)(i / CHUNKS) * (WIDTH / 4);
    const u64 key = key_of_chunk(row, i % CHUNKS, rank * WIDTH, lane);
    if (lane == 0) meeting.give_all(i, uint2{u32(key >> 32), u32(key)});
  }
  __syncthreads();
  if (threadIdx.x == 0) count_launch(state);

#pragma unroll 1
  for (int row = warp; row < rows; row += warps) {
    int senders[KEYS_A_LANE];
    long long places[KEYS_A_LANE];
    uint2 found[KEYS_A_LANE];
#pragma unroll
    for (int i = 0; i < KEYS_A_LANE; ++i) {
      const int key = lane + i * LANES;
      senders[i] = key < KEYS ? key / CHUNKS : -1;
      places[i] = (long long)row * CHUNKS + key % CHUNKS;
    }
    u64 best = u64(NAN_ORDER) << 32;  // of a row that will not be known
    if (meeting.take_from(senders, places, found)) {
      best = 0;
#pragma unroll
      for (int i = 0; i < KEYS_A_LANE; ++i) {
        if (senders[i] >= 0) best = larger(best, u64(found[i].x) << 32 | found[i].y);
      }
    }
    best = largest_of_warp(best);
    const bool is_nan = u32(best >> 32) == NAN_ORDER;
    if (lane == 0) out[row * stride + offset] = is_nan ? -1 : int(LAST_ID - u32(best));
  }
}

// The likeliest ids of rows of logits that ranks with a GPU each have shares of, of several heads at once. A rank hands
// every other the `count` largest of each CHUNK of its ids, and what a softmax needs of the chunk: 8 bytes each, for
// 4 * CHUNK. meeting.cuh says how. All ranks then have the same lists, those of chunks of a whole row.
//
// Keys and sums are those of beam_search's `list_best` (triton_kernel.py): NaN is the least likely, logits are cut to
// LARGE, and a chunk's places behind its last id have the key 0. A key goes as (order, LAST_ID - id), and no word is all
// ones, which meeting.cuh would change.
//
// Macros: RANKS, LEAVES (1), WIDTH (ids of a rank), OUT_WIDTH (ids in all), CHUNK, MOST (ids that may be listed).
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 256;  // as in kernel.py
constexpr int LANES = THREADS < 32 ? THREADS : 32;
constexpr int CHUNKS = (WIDTH + CHUNK - 1) / CHUNK;  // of a rank's share of a row
constexpr int VECTORS = CHUNK / (4 * LANES);         // of a lane
constexpr int PLACES = (MOST + 1 + LANES - 1) / LANES;
constexpr u32 LAST_ID = 0x7fffffff;
constexpr float LARGE = 1e38f;
static_assert(WIDTH % 4 == 0 && CHUNK % (4 * LANES) == 0, "rows are whole vectors");

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE u32 order_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float value_of(u32 order) {
  return __uint_as_float(order >> 31 ? order & 0x7fffffff : ~order);
}

DEVICE float cut(float x) {
  if (x != x || x < -LARGE) return -LARGE;
  return x > LARGE ? LARGE : __fadd_rn(x, 0.0f);  // no -0
}

// A chunk of this rank's share of a row, by the lanes of a warp: lane l of it has the numbers l, l + LANES, ... of the
// list, which are its `count` keys and (largest logit, sum of exponentials).
DEVICE void list_chunk(const float4* row, int chunk, int first_id, int count, int lane, uint2 (&list)[PLACES]) {
  const int first = chunk * CHUNK + 4 * lane;
  float x[VECTORS][4];
  {
    float4 loaded[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {  // all at once; behind the row its last ones, which are not looked at
      loaded[i] = row[min(first + 4 * LANES * i, WIDTH - 4) / 4];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      x[i][0] = cut(loaded[i].x), x[i][1] = cut(loaded[i].y);
      x[i][2] = cut(loaded[i].z), x[i][3] = cut(loaded[i].w);
    }
  }
  float last = 2 * LARGE, top = -LARGE;  // of what is listed: the last logit and id
  int last_id = -1;
#pragma unroll 1
  for (int nth = 0; nth < count; ++nth) {
    float best = 0;
    int best_id = -1;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = first + 4 * LANES * i + c, id = first_id + at;
        const bool is_left = x[i][c] < last || (x[i][c] == last && id > last_id);
        const bool is_there = at < WIDTH && id < OUT_WIDTH && is_left;
        const bool is_better = is_there && (best_id < 0 || x[i][c] > best);
        best = is_better ? x[i][c] : best;
        best_id = is_better ? id : best_id;
      }
    }
    const u32 own = best_id < 0 ? 0 : order_of(best);  // no number has the order 0
    const u32 order = __reduce_max_sync(0xffffffffu, own);
    const u32 rest = __reduce_max_sync(0xffffffffu, order && own == order ? LAST_ID - u32(best_id) : 0);
    if (nth == 0 && order) top = value_of(order);
    last = order ? value_of(order) : -2 * LARGE;
    last_id = int(LAST_ID - rest);
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      if (nth == lane + i * LANES) list[i] = uint2{order, rest};
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int at = first + 4 * LANES * i + c;
      const float part = exp2_approx(__fmul_rn(__fadd_rn(x[i][c], -top), 1.44269504f));
      if (at < WIDTH && first_id + at < OUT_WIDTH) sum = __fadd_rn(sum, part);
    }
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
#pragma unroll
  for (int i = 0; i < PLACES; ++i) {
    if (count == lane + i * LANES) list[i] = uint2{__float_as_uint(top), __float_as_uint(sum)};
  }
}

// addresses: of each head's logits, of `rows` rows each. keys [rows, RANKS * CHUNKS, count] of each head, `stride` from
// head to head; sums [rows, RANKS * CHUNKS, 2] of the first head alone, null: of none.
extern "C" __global__ void __launch_bounds__(THREADS)
    offers(const long long* bases, State* state, int* lost, const long long* addresses,
           long long* keys, float* sums, int count, int rows, int stride, int rank, int heads,
           long long slot_bytes, long long limit_ns) {
  launch_dependents();
  Meeting meeting(bases, lost, rank, slot_bytes, limit_ns);
  wait_for_dependencies();
  meeting.half = half_of(read_begun(state));
  const int lane = threadIdx.x % LANES, warps = gridDim.x * (THREADS / LANES);
  const int warp = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  const int lists = heads * rows * CHUNKS, entries = count + 1;
#pragma unroll 1
  for (int i = warp; i < lists; i += warps) {
    const int row = i / CHUNKS;  // of all heads
    const float4* logits = (const float4*)(u64)addresses[row / rows];
    uint2 list[PLACES];
    list_chunk(logits + (long long)(row % rows) * (WIDTH / 4), i % CHUNKS, rank * WIDTH, count, lane, list);
#pragma unroll
    for (int place = 0; place < PLACES; ++place) {
      const int entry = lane + place * LANES;
      if (entry < entries) meeting.give_all((long long)i * entries + entry, list[place]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) count_launch(state);

#pragma unroll 1
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < lists * entries; i += gridDim.x * THREADS) {
    int senders[RANKS];
    long long places[RANKS];
    uint2 found[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) senders[r] = r, places[r] = i;
    const bool is_known = meeting.take_from(senders, places, found);
    const int list = i / entries, entry = i % entries;
    const int row = list / CHUNKS, head = row / rows;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const uint2 words = is_known ? found[r] : uint2{0, 0};
      const long long at = ((long long)(row % rows) * RANKS + r) * CHUNKS + list % CHUNKS;
      if (entry < count) {
        keys[(long long)head * stride + at * count + entry] = (long long)(u64(words.x) << 31 | words.y);
      } else if (sums && head == 0) {
        sums[2 * at] = is_known ? __uint_as_float(words.x) : -LARGE;
        sums[2 * at + 1] = __uint_as_float(words.y);
      }
    }
  }
}

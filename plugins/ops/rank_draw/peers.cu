// The token of each row of logits that ranks with a GPU each have shares of, drawn without filters or the best id.
// `sampling.scan` has found the best of every chunk of a rank's share; a warp takes the best of these, hands it to all
// ranks, and takes the best of theirs: 32 bytes a row and rank. meeting.cuh says how.
//
// A record is two numbers of several words, of which the first decide: the best logit and its id, as in
// rank_argmax/peers.cu, and the best draw, which is a pair of float64 (`exact_sum` of triton_values.py) and its id.
// Draws are equal only where all of them is, so the best is the same in any order of comparing. No word is all ones,
// which meeting.cuh would change.
//
// Macros: RANKS, LEAVES (1), CHUNKS (of a rank's share of a row).
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 256;  // as in kernel.py
constexpr int LANES = THREADS < 32 ? THREADS : 32;
constexpr u32 NAN_ORDER = 0xfffffffe, LAST_ID = 0x7fffffff;
constexpr u32 LEAST_ORDER = 0x00800000;  // of the least finite number: banned ids lie below
constexpr int LOGIT_WORDS = 2, WORDS = 8;
constexpr u32 PART = (1u << 26) - 1;

struct Record {
  u32 word[WORDS];
};

DEVICE u64 order_of(long long bits) { return u64(bits ^ (bits >> 63 & 0x7fffffffffffffff)) ^ 1ull << 63; }

// key: of sampling's `best_key`. total, rest: the bits of a draw, which is none where the chunk has no finite number.
DEVICE Record record_of(long long key, long long total, long long rest, int id) {
  Record made = {};
  made.word[0] = u32(key >> 31);
  if (made.word[0] > NAN_ORDER) made.word[0] = NAN_ORDER;
  made.word[1] = u32(key) & LAST_ID;
  if (made.word[0] < LEAST_ORDER || made.word[0] == NAN_ORDER) return made;
  const u64 a = order_of(total), b = order_of(rest);
  made.word[2] = u32(a >> 38);
  made.word[3] = u32(a >> 12) & PART;
  made.word[4] = (u32(a) & 0xfff) << 14 | u32(b >> 50);
  made.word[5] = u32(b >> 24) & PART;
  made.word[6] = u32(b) & 0xffffff;
  made.word[7] = LAST_ID - u32(id);
  return made;
}

template <int FIRST, int END>
DEVICE void take_larger(Record& best, const Record& other) {
  bool is_larger = false, is_equal = true;
#pragma unroll
  for (int i = FIRST; i < END; ++i) {
    is_larger |= is_equal && other.word[i] > best.word[i];
    is_equal &= other.word[i] == best.word[i];
  }
#pragma unroll
  for (int i = FIRST; i < END; ++i) best.word[i] = is_larger ? other.word[i] : best.word[i];
}

template <int FIRST, int END>
DEVICE void take_largest_of_warp(Record& best) {
  bool may_be = true;
#pragma unroll
  for (int i = FIRST; i < END; ++i) {
    const u32 most = __reduce_max_sync(0xffffffffu, may_be ? best.word[i] : 0);
    may_be &= best.word[i] == most;
    best.word[i] = most;
  }
}

DEVICE void join_warp(Record& best) {
  take_largest_of_warp<0, LOGIT_WORDS>(best);
  take_largest_of_warp<LOGIT_WORDS, WORDS>(best);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    best_draws(const long long* bases, State* state, int* lost, const long long* keys,
               const long long* totals, const long long* rests, const int* ids, const int* greedy,
               int* out, int per_request, int stride, int offset, int rank, int rows,
               long long slot_bytes, long long limit_ns) {
  launch_dependents();
  Meeting meeting(bases, lost, rank, slot_bytes, limit_ns);
  wait_for_dependencies();
  meeting.half = half_of(read_begun(state));
  const int lane = threadIdx.x % LANES, warps = gridDim.x * (THREADS / LANES);
  const int warp = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
#pragma unroll 1
  for (int row = warp; row < rows; row += warps) {
    Record best = {};
#pragma unroll 1
    for (int chunk = lane; chunk < CHUNKS; chunk += LANES) {
      const long long at = (long long)row * CHUNKS + chunk;
      const Record found = record_of(keys[at], totals[at], rests[at], ids[at]);
      take_larger<0, LOGIT_WORDS>(best, found);
      take_larger<LOGIT_WORDS, WORDS>(best, found);
    }
    join_warp(best);
    const u32(&w)[WORDS] = best.word;
    // a half of the record by each of two lanes
    const uint4 half = lane ? uint4{w[4], w[5], w[6], w[7]} : uint4{w[0], w[1], w[2], w[3]};
    if (lane < 2) meeting.give_all(2LL * row + lane, half);
  }
  __syncthreads();
  if (threadIdx.x == 0) count_launch(state);

#pragma unroll 1
  for (int row = warp; row < rows; row += warps) {
    Record best = {{NAN_ORDER}};  // of a row that will not be known
    const int sender = lane < RANKS ? lane : -1;
    uint4 found[2];
    const bool is_known = meeting.take_from({sender, sender}, {2LL * row, 2LL * row + 1}, found);
    if (is_known) {
      best = sender < 0 ? Record{}
                        : Record{{found[0].x, found[0].y, found[0].z, found[0].w, found[1].x,
                                  found[1].y, found[1].z, found[1].w}};
    }
    join_warp(best);
    const u32 order = best.word[0];
    const bool is_best = order < LEAST_ORDER || greedy[row / per_request];
    const u32 id = LAST_ID - (is_best ? best.word[1] : best.word[WORDS - 1]);
    if (lane == 0) out[row * stride + offset] = order == NAN_ORDER ? -1 : int(id);
  }
}

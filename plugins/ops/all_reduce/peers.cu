// What ranks with a GPU each exchange: partial sums, which are added, or columns, which are put side by side.
// meeting.cuh says how; sums are finished with the expressions of reference.py.
//
// Macros: RANKS, LEAVES, WIDTH (columns that a rank gives), GATHER (0 | 1), OUT_WIDTH, OUT_TYPE (of what is gathered,
// too; sums are float32).
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 256;  // as in peers.py
constexpr int WORDS = GATHER ? WIDTH * OUT_TYPE::bytes / 4 : WIDTH;  // of 32 bits that a rank gives of a row
static_assert(WORDS % 4 == 0, "rows are whole vectors");

#if !GATHER
template <class Type>
DEVICE float widened(typename Type::Storage x) {
  if constexpr (Type::bytes == 4) return x;
  else return Type::unpack(x);
}
#endif

#if GATHER
// The c-th number of a vector.
template <class Type>
DEVICE typename Type::Storage item(const u32 (&word)[4], int c) {
  if constexpr (Type::bytes == 4) return __uint_as_float(word[c]);
  else return u16(word[c / 2] >> 16 * (c % 2));
}
#endif

DEVICE float4 own_at(const float4* x, long long i) {
  return own_vector(x, i / (WORDS / 4), int(i % (WORDS / 4)), WORDS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const long long* bases, State* state, int* lost, const float4* x,
             const float* weight_scale, const float* x_scale, const OUT_TYPE::Storage* bias,
             OUT_TYPE::Storage* out, int rank, int rows, long long slot_bytes, long long limit_ns) {
  launch_dependents();
  Meeting meeting(bases, lost, rank, slot_bytes, limit_ns);
  const float scale = x_scale ? *x_scale : 1.0f;
  wait_for_dependencies();
  meeting.half = half_of(read_begun(state));
  const long long vectors = (long long)rows * (WORDS / 4), stride = (long long)gridDim.x * THREADS;
  const long long first = (long long)blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
  for (long long i = first; i < vectors; i += stride) meeting.give(i, words_of(own_at(x, i)));
  __syncthreads();
  if (threadIdx.x == 0) count_launch(state);

#pragma unroll 1
  for (long long i = first; i < vectors; i += stride) {
    float4 part[RANKS][1];
    const float4 own = own_at(x, i);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) part[r][0] = own;
    if (!meeting.take(i, 1, part)) return;
    const long long row = i / (WORDS / 4);
#if GATHER
    constexpr int ITEMS = 16 / OUT_TYPE::bytes;  // of a vector
    const int column = int(i % (WORDS / 4)) * ITEMS;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      OUT_TYPE::Storage* const to = out + row * OUT_WIDTH + r * WIDTH + column;
      if constexpr (OUT_WIDTH == RANKS * WIDTH) {
        *(float4*)to = part[r][0];
      } else {
        const uint4 words = words_of(part[r][0]);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int c = 0; c < ITEMS; ++c) {
          if (r * WIDTH + column + c < OUT_WIDTH) to[c] = item<OUT_TYPE>(word, c);
        }
      }
    }
#else
    const int column = int(i % (WORDS / 4)) * 4;
    const float4 total = tree<0, RANKS>([&](int r) { return part[r][0]; });
    const float sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float y = sums[c];
      if (weight_scale) y = __fmul_rn(y, __fmul_rn(scale, weight_scale[column + c]));
      else if (x_scale) y = __fmul_rn(y, scale);
      if (bias) y = __fadd_rn(y, widened<OUT_TYPE>(bias[column + c]));
      out[row * OUT_WIDTH + column + c] = OUT_TYPE::pack(y);
    }
#endif
  }
}

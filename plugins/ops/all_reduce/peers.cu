// What ranks with a GPU each exchange: partial sums, which are added, or columns, which are put side by side.
// meeting.cuh says how; sums are finished with the expressions of reference.py.
//
// Macros: RANKS, LEAVES, WIDTH (columns that a rank gives), GATHER (0 | 1), OUT_WIDTH, OUT_TYPE.
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 256;  // as in peers.py
static_assert(WIDTH % 4 == 0, "rows are whole vectors");

#if !GATHER
template <class Type>
DEVICE float widened(typename Type::Storage x) {
  if constexpr (Type::bytes == 4) return x;
  else return Type::unpack(x);
}
#endif

DEVICE float4 own_at(const float4* x, long long i) {
  return own_vector(x, i / (WIDTH / 4), int(i % (WIDTH / 4)), WIDTH);
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
  const long long vectors = (long long)rows * (WIDTH / 4), stride = (long long)gridDim.x * THREADS;
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
    const long long row = i / (WIDTH / 4);
    const int column = int(i % (WIDTH / 4)) * 4;
#if GATHER
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const float values[4] = {part[r][0].x, part[r][0].y, part[r][0].z, part[r][0].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int to = r * WIDTH + column + c;
        if (to < OUT_WIDTH) out[row * OUT_WIDTH + to] = values[c];
      }
    }
#else
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

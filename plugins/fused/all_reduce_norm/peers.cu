// The sum over ranks with a GPU each, what ends a product, and the norm that follows: added to the residual,
// normalized and, with OUT_TYPE E4M3, quantized in the launch in which the partial sums arrive.
//
// A cluster of blocks has a row, every thread eight adjacent columns of it, and of rows longer than 8,192 up to
// eight more, 8,192 behind them, as threads of rms_norm have: it hands its partial sums to the other
// ranks, waits for theirs (ops/all_reduce/meeting.cuh) and keeps the row in registers. Only sums of squares pass
// between blocks, as parts that every warp sends to all blocks of the cluster. The bits are those of
// plugins/ops/all_reduce followed by plugins/ops/rms_norm (norm_math.cuh), with one hop, in which all ranks compute all
// rows, and with two.
//
// Macros: RANKS, LEAVES, HIDDEN (a multiple of 256), WARPS (of a block), ROW_WARPS (warps of a row), MODEL_TYPE, QUANTIZED (0 | 1: out is FP8),
// HOPS (1 | 2), KEEPS (0 | 1), IS_GIVEN (1: the product before handed its sums to the other ranks itself).
#include "backends/cuda/sm90/cluster.cuh"
#include "backends/cuda/sm90/norm_math.cuh"
#include "ops/all_reduce/meeting.cuh"

constexpr int THREADS = 32 * WARPS, UNIT = 8;
constexpr int CLUSTER = ROW_WARPS / WARPS;  // blocks of a row
constexpr int ROW_THREADS = 32 * ROW_WARPS, UNITS = (HIDDEN + UNIT * ROW_THREADS - 1) / (UNIT * ROW_THREADS);
constexpr int ROW_UNITS = HIDDEN / UNIT, ROW_VECTORS = HIDDEN / 4;
constexpr u32 SQUARES_BYTES = 32 * 4, BARRIERS = 2 * SQUARES_BYTES;  // offsets in shared memory; as in peers.py
static_assert(ROW_WARPS % WARPS == 0 && CLUSTER <= 8 && ROW_WARPS <= 32, "a cluster has whole warps");
static_assert(HIDDEN % 256 == 0, "a warp has 256 columns or none");

// Four bytes into another block's shared memory, counted by that block's barrier.
DEVICE void send_part(u32 address, u32 barrier, float x) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
      "f"(x), "r"(barrier)
      : "memory");
}

// What ends a product, for this thread's columns.
struct Ending {
  float scale[UNIT];
  uint4 bias;
  bool is_scaled, is_biased;

  DEVICE void load(const float4* weight_scale, const float* x_scale, const uint4* bias_, int unit) {
    bias = {0, 0, 0, 0}, is_scaled = weight_scale || x_scale, is_biased = bias_;
    const float all = x_scale ? __ldg(x_scale) : 1.0f;
#pragma unroll
    for (int i = 0; i < UNIT / 4; ++i) {
      const float4 own = weight_scale ? __ldg(weight_scale + 2 * unit + i) : float4{1, 1, 1, 1};
      scale[4 * i] = __fmul_rn(all, own.x), scale[4 * i + 1] = __fmul_rn(all, own.y);
      scale[4 * i + 2] = __fmul_rn(all, own.z), scale[4 * i + 3] = __fmul_rn(all, own.w);
    }
    if (is_biased) bias = __ldg(bias_ + unit);
  }
  DEVICE float finish(float sum, int i, float added) const {
    if (is_scaled) sum = __fmul_rn(sum, scale[i]);
    return is_biased ? __fadd_rn(sum, added) : sum;
  }
  DEVICE u32 pair(float low, float high, int i, u32 added) const {
    return MODEL_TYPE::pack_pair(finish(low, i, Model::low(added)),
                                 finish(high, i + 1, Model::high(added)));
  }
  // Rounded once, as the product of one rank is.
  DEVICE uint4 unit(const float4& a, const float4& b) const {
    return {pair(a.x, a.y, 0, bias.x), pair(a.z, a.w, 2, bias.y), pair(b.x, b.y, 4, bias.z),
            pair(b.z, b.w, 6, bias.w)};
  }
};

// The row's sum of squares, from the parts of all warps of the cluster.
struct Squares {
  u32 room;

  DEVICE explicit Squares(u32 room_) : room(room_) {}
  DEVICE u32 part_room(int turn) const { return room + turn * SQUARES_BYTES; }
  DEVICE u32 barrier(int turn) const { return room + BARRIERS + 8 * turn; }
  DEVICE void start() const {
    for (int turn = 0; turn < 2; ++turn) barrier_init(barrier(turn), 1);
    barrier_init_fence();
  }
  DEVICE float inverse_rms(float sum, int nth, float epsilon) const {
    const int turn = nth % 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) barrier_expect(barrier(turn), ROW_WARPS * 4);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    const int part = blockIdx.x % CLUSTER * WARPS + warp;
    if (lane < CLUSTER) {
      send_part(remote_address(part_room(turn) + 4 * part, lane),
                remote_address(barrier(turn), lane), sum);
    }
    __syncwarp();
    barrier_wait_cluster(barrier(turn), nth / 2 % 2);
    return inverse_rms_of(part_room(turn), epsilon);
  }
};

DEVICE float4 own_at(const float4* x, int row, int vector) {
  return own_vector(x, row, vector, HIDDEN);
}

#if QUANTIZED
typedef uint2 OutUnit;
DEVICE OutUnit stored(const uint4& y, const Divisor& divisor) { return divisor.unit(y); }
#else
typedef uint4 OutUnit;
DEVICE OutUnit stored(const uint4& y, const Divisor&) { return y; }
#endif

// Where the two vectors of a thread lie in a slot: as columns do where products gave them, else 32 apart, so that a warp
// stores whole lines. A row's results have the same places.
constexpr int APART = IS_GIVEN ? 1 : 32;
DEVICE long long place_of(int row, int unit) {
  const int vector = IS_GIVEN ? 2 * unit : unit / 32 * 64 + unit % 32;
  return (long long)row * ROW_VECTORS + vector;
}
DEVICE long long result_of(int row, int unit) {  // in OutUnits
  if (!QUANTIZED) return place_of(row, unit) + APART;
  return 2 * (place_of(row, unit) + APART) - unit % 32;
}

// Whether a row has a thread's columns: the last of a row of no whole number of ROW_THREADS are nobody's.
DEVICE bool is_in_row(int unit) { return ROW_UNITS % ROW_THREADS == 0 || unit < ROW_UNITS; }

// What does not differ between rows, of eight of a thread's columns.
struct Columns {
  Ending ending;
  uint4 factors;

  DEVICE void load(const float4* weight_scale, const float* x_scale, const uint4* bias,
                   const uint4* norm_weight, int unit) {
    if (!is_in_row(unit)) return;
    ending.load(weight_scale, x_scale, bias, unit);
    factors = __ldg(norm_weight + unit);
  }
};

// Vectors that a thread waits for at once: one by one where all would not fit into registers.
constexpr int AT_ONCE = UNITS == 2 && RANKS == 8 && !IS_GIVEN ? 1 : 2;

// This rank's own numbers become the sums over all ranks. False where a rank has not come.
DEVICE bool take_sums(Meeting& meeting, long long at, float4* sums) {
  float4 part[RANKS][AT_ONCE];
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) part[r][i] = sums[i];
  }
  if (!meeting.take(at, APART, part)) return false;
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    sums[i] = tree<0, RANKS>([&](int r) { return part[r][i]; });
  }
  return true;
}

// With two hops a row is one rank's, which normalizes it and hands the others what they store; but not the residual
// stream where KEEPS says that the next such launch of the step alone reads it, in which the row is that rank's again. That lies where its
// partial sums would, which nobody wants of a row that it has itself.
DEVICE int owner_of(int row, int stride) { return HOPS == 1 ? 0 : (row + row / stride) % RANKS; }

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const long long* bases, State* state, int* lost, const float4* x,
                const float4* weight_scale, const float* x_scale, const uint4* bias,
                const uint4* residual, const uint4* norm_weight, const float* scale, OutUnit* out,
                uint4* residual_out, float epsilon, int rank, int rows, long long slot_bytes,
                long long limit_ns) {
  extern __shared__ u8 memory[];
  launch_dependents();
  const Squares squares(shared_address(memory));
  if (threadIdx.x == 0) squares.start();
  cluster_arrive();
  const int thread = blockIdx.x % CLUSTER * THREADS + threadIdx.x;  // of the row
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  Meeting meeting(bases, lost, rank, slot_bytes, limit_ns);
  Columns columns[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    columns[u].load(weight_scale, x_scale, bias, norm_weight, thread + u * ROW_THREADS);
  }
  const Divisor divisor(QUANTIZED ? __ldg(scale) : 1.0f);
  cluster_wait();  // every block of the cluster has initialised its barriers
  wait_for_dependencies();
  meeting.half = half_of(read_begun(state));
#pragma unroll 4  // rows in flight
  for (int row = first; row < (IS_GIVEN ? 0 : rows); row += stride) {
    const int owner = owner_of(row, stride);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = thread + u * ROW_THREADS;
      if (!is_in_row(unit)) continue;
      const long long at = place_of(row, unit);
      const float4 own[2] = {own_at(x, row, 2 * unit), own_at(x, row, 2 * unit + 1)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (HOPS == 1) meeting.give(at + i * APART, words_of(own[i]));
        else if (owner != rank) meeting.give_one(owner, at + i * APART, words_of(own[i]));
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) count_launch(state);
  int nth = 0;
#pragma unroll 1
  for (int row = first; row < rows; row += stride) {
    if (HOPS == 2 && owner_of(row, stride) != rank) continue;
    uint4 h[UNITS];
    float squares_sum = 0;
    bool is_here = true;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = thread + u * ROW_THREADS;
      if (!is_in_row(unit)) continue;
      float4 sum[2] = {own_at(x, row, 2 * unit), own_at(x, row, 2 * unit + 1)};
      const uint4 before = __ldcg(residual + (long long)row * ROW_UNITS + unit);
#pragma unroll
      for (int i = 0; i < 2; i += AT_ONCE) {
        is_here = take_sums(meeting, place_of(row, unit) + i * APART, sum + i) && is_here;
      }
      h[u] = add_units(columns[u].ending.unit(sum[0], sum[1]), before);
      squares_sum = u ? square_sum(h[u], squares_sum) : square_sum(h[u]);
    }
    const float inverse = squares.inverse_rms(squares_sum, nth++, epsilon);
    if (!is_here) continue;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = thread + u * ROW_THREADS;
      if (!is_in_row(unit)) continue;
      const long long to = (long long)row * ROW_UNITS + unit;
      const OutUnit y = stored(normal_unit(h[u], columns[u].factors, inverse), divisor);
      if (residual_out) residual_out[to] = h[u];
      out[to] = y;
      if (HOPS == 1) continue;
      if (residual_out && !KEEPS) meeting.give(place_of(row, unit), h[u]);
      meeting.give(result_of(row, unit), y);
    }
  }
  if (HOPS == 1) return;
#pragma unroll 1
  for (int row = first; row < rows; row += stride) {
    const int owner = owner_of(row, stride);
    if (owner == rank) continue;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = thread + u * ROW_THREADS;
      if (!is_in_row(unit)) continue;
      const long long to = (long long)row * ROW_UNITS + unit;
      uint4 h;
      OutUnit y;
      if (residual_out && !KEEPS && !meeting.take_one(owner, place_of(row, unit), h)) return;
      if (!meeting.take_one(owner, result_of(row, unit), y)) return;
      if (residual_out && !KEEPS) residual_out[to] = h;
      out[to] = y;
    }
  }
}

// What ranks with a GPU each exchange: partial sums, which are added, or columns, which are put side by side.
//
// Every rank has a buffer that all others map, with a slot for each sender. A launch stores its own numbers
// into its slot of every peer, then a flag for each thread block, waits for the flags of the same block of all
// peers, and computes from its own memory. Sums are added as a balanced tree, (0 + 1) + (2 + 3), with the
// expressions of reference.py; all ranks compute all rows, so all go on with the same bits.
//
// Launches are numbered alike on all ranks (`epoch`, kept here, because graphs have no arguments), and use the
// two halves of the buffer in turn. A peer stores into a half again two launches later, which is safe: it has
// then seen a flag of mine of the launch between, and that launch began after this one had ended.
//
// No block waits before it has stored all that is its own, and all blocks of a launch are on the device at once
// (MAX_BLOCKS), so ranks cannot wait for each other in a circle. Where a peer does not come, the waiting ends
// after `limit_ns`, or when the host says so, and `lost` tells which rank it was; what follows is not used.
//
// Macros: RANKS, WIDTH (columns of `x`), GATHER (0 | 1), OUT_WIDTH, OUT_TYPE.
#include "backends/cuda/sm90/hopper.cuh"

constexpr int THREADS = 256, MAX_BLOCKS = 128;  // as in peers.py
constexpr int FLAG_BYTES = 2 * RANKS * MAX_BLOCKS * 4;
constexpr int LOOK_AT_HOST = 1024;  // polls; the host's memory is far
static_assert(WIDTH % 4 == 0, "rows are whole vectors");

struct State {  // of this rank's launches
  u32 epoch, done;
};

DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEVICE u32 look(const u32* flag) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
}

DEVICE void raise_flag(u32* flag, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(x) : "memory");
}

DEVICE int read_host(const int* lost) {
  int x;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(lost) : "memory");
  return x;
}

DEVICE void write_host(int* lost, int x) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(lost), "r"(x) : "memory");
}

// Stored by others meanwhile: not from this multiprocessor's cache.
DEVICE float4 load(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

#if !GATHER
template <class Type>
DEVICE float widened(typename Type::Storage x) {
  if constexpr (Type::bytes == 4) return x;
  else return Type::unpack(x);
}
#endif

DEVICE float4 add(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

template <int FIRST, int COUNT>
DEVICE float4 tree(const float4 (&part)[RANKS]) {
  if constexpr (COUNT == 1) return part[FIRST];
  else return add(tree<FIRST, COUNT / 2>(part), tree<FIRST + COUNT / 2, COUNT / 2>(part));
}

DEVICE u32* flag_at(u64 base, u32 half, int sender, int block) {
  return (u32*)base + (half * RANKS + sender) * MAX_BLOCKS + block;
}

DEVICE float4* slot_at(u64 base, u32 half, int sender, long long slot_bytes) {
  return (float4*)(base + FLAG_BYTES + (half * RANKS + sender) * slot_bytes);
}

// Waits for a block of a peer; false where it has not come.
DEVICE bool wait_for(const u32* flag, u32 wanted, int* lost, int peer, long long limit_ns) {
  u64 began = 0;
  for (u32 polls = 1; look(flag) != wanted; ++polls) {
    if (polls % LOOK_AT_HOST) continue;
    if (read_host(lost)) return false;
    const u64 now = now_ns();
    if (!began) began = now;
    if (now - began > u64(limit_ns)) {
      write_host(lost, peer + 1);
      return false;
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const long long* bases, State* state, int* lost, const float* x,
             const float* weight_scale, const float* x_scale, const OUT_TYPE::Storage* bias,
             OUT_TYPE::Storage* out, int rank, int rows, long long slot_bytes, long long limit_ns) {
  launch_dependents();
  wait_for_dependencies();
  const u32 epoch = *(volatile u32*)&state->epoch, half = epoch & 1;
  const long long vectors = (long long)rows * (WIDTH / 4), stride = (long long)gridDim.x * THREADS;
  const long long first = (long long)blockIdx.x * THREADS + threadIdx.x;
  const float4* own = (const float4*)x;
  u64 base[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; ++r) base[r] = (u64)bases[r];

#pragma unroll 1
  for (long long i = first; i < vectors; i += stride) {
    const float4 value = own[i];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r != rank) slot_at(base[r], half, rank, slot_bytes)[i] = value;
    }
  }
  __syncthreads();
  const int peer = threadIdx.x;
  const u64 mine = (u64)bases[rank];
  bool is_here = true;
  if (peer < RANKS && peer != rank) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    raise_flag(flag_at((u64)bases[peer], half, rank, blockIdx.x), epoch + 1);
    is_here = wait_for(flag_at(mine, half, peer, blockIdx.x), epoch + 1, lost, peer, limit_ns);
  }
  if (__syncthreads_and(is_here)) {
    float scale = x_scale ? *x_scale : 1.0f;
#pragma unroll 1
    for (long long i = first; i < vectors; i += stride) {
      float4 part[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
        part[r] = r == rank ? own[i] : load(slot_at(mine, half, r, slot_bytes) + i);
      }
      const long long row = i / (WIDTH / 4);
      const int column = int(i % (WIDTH / 4)) * 4;
#if GATHER
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
        const float values[4] = {part[r].x, part[r].y, part[r].z, part[r].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int to = r * WIDTH + column + c;
          if (to < OUT_WIDTH) out[row * OUT_WIDTH + to] = values[c];
        }
      }
#else
      const float4 total = tree<0, RANKS>(part);
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
  __syncthreads();
  if (threadIdx.x == 0) {  // the last block numbers the next launch
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if (atomicAdd(&state->done, 1) == gridDim.x - 1) {
      state->done = 0;
      *(volatile u32*)&state->epoch = epoch + 1;
    }
  }
}

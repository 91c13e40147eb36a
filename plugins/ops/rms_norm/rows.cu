// The residual addition, norm and quantization of triton_kernel.py with the same bits (norm_math.cuh). A thread block has a
// row and a thread eight adjacent elements of it.
//
// Macros: MODEL_TYPE, HIDDEN (a multiple of 256, at most 8192), FEW (0 | 1: steps of up to 32 rows, of which every row is
// waited for: L2 is asked for residuals, which weights have pushed out of it, before the wait, and sums are stored first).
#include "backends/cuda/sm90/norm_math.cuh"

constexpr int PARTS = HIDDEN / 256, THREADS = 32 * PARTS;  // a warp has a part
static_assert(HIDDEN % 256 == 0 && PARTS <= 32, "a row has whole warps");

// residual_out: null, or where the sums go, which may be where the residual is.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rows(const uint4* x, const uint4* weight, const uint4* residual, const float* scale,
              uint2* out, uint4* residual_out, float epsilon) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const u32 squares = shared_address(memory);
  const int unit = blockIdx.x * THREADS + threadIdx.x, warp = threadIdx.x / 32;
  const uint4 factors = __ldg(weight + threadIdx.x);
  const Divisor divisor(__ldg(scale));
  if (FEW && threadIdx.x % 8 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + unit));  // lines of 128 bytes
  wait_for_dependencies();
  const uint4 h = add_units(__ldcg(x + unit), __ldcg(residual + unit));
  if (FEW && residual_out) residual_out[unit] = h;
  float sum = square_sum(h);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
  if (threadIdx.x % 32 == 0) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + warp * 4), "f"(sum) : "memory");
  }
  __syncthreads();
  out[unit] = divisor.unit(normal_unit(h, factors, inverse_rms_of(squares, epsilon)));
  if (!FEW && residual_out) residual_out[unit] = h;
}

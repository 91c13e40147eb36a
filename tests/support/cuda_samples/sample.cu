// A CUDA C++ kernel with what the compiler and driver must handle: macros, an include, every kind
// of argument, dynamic shared memory.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(128)
add_rows(const float* x, float* out, int rows, long long stride, float factor) {
    extern __shared__ float staged[];
    wait_for_producers();
    const int row = blockIdx.x;
    if (row >= rows) return;
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) staged[i] = x[row * stride + i];
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x)
        out[row * stride + i] = factor * staged[WIDTH - 1 - i];
}

struct alignas(64) TensorMap { unsigned long long words[16]; };

// out[i] = the i-th byte of a box of 8 rows of 128 bytes that TMA put into shared memory.
extern "C" __global__ void __launch_bounds__(128)
copy_box(const __grid_constant__ TensorMap map, unsigned char* out, int row) {
    extern __shared__ __align__(1024) unsigned char box[];
    __shared__ __align__(8) unsigned long long barrier;
    wait_for_producers();
    const unsigned where = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(where));
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(where));
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"((unsigned)__cvta_generic_to_shared(box)),
            "l"(&map), "r"(0), "r"(row), "r"(where)
            : "memory");
    }
    __syncthreads();
    asm volatile(
        "{\n.reg .pred done;\nwait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra wait;\n}" ::"r"(where)
        : "memory");
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[i] = box[i];
}

// out[block] = the block's rank in its cluster.
extern "C" __global__ void __launch_bounds__(32) cluster_ranks(int* out) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    wait_for_producers();
    if (threadIdx.x == 0) out[blockIdx.x] = (int)rank;
}

// Keeps an array it cannot hold in registers: its stack must be reported.
extern "C" __global__ void spilling(int* out, int index) {
    int values[64];
    for (int i = 0; i < 64; ++i) values[i] = out[i];
    for (int i = 0; i < index; ++i) values[(i * index) & 63] += values[i & 63];
    for (int i = 0; i < 64; ++i) out[i] = values[i];
}

// What few kernels need of barriers in shared memory besides hopper.cuh.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

// The phase also waits for `bytes` more; does not arrive.
DEVICE void barrier_expect_more(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is over. The first waits for it up to a time limit, the second does not wait.
#define ASK_BARRIER(name, instruction)                                          \
  DEVICE bool name(u32 barrier, u32 parity) {                                   \
    u32 is_over;                                                                \
    asm volatile(                                                               \
        "{\n"                                                                   \
        ".reg .pred done;\n"                                                    \
        "mbarrier." #instruction ".parity.shared::cta.b64 done, [%1], %2;\n"    \
        "selp.u32 %0, 1, 0, done;\n"                                            \
        "}"                                                                     \
        : "=r"(is_over)                                                         \
        : "r"(barrier), "r"(parity)                                             \
        : "memory");                                                            \
    return is_over;                                                             \
  }
ASK_BARRIER(barrier_try, try_wait)
ASK_BARRIER(barrier_is_over, test_wait)
#undef ASK_BARRIER

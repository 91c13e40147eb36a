// The merged result of a context's beginning is passed to the next thread block by a flag, which is zero before and after.
// A block waits only for blocks with smaller numbers, so all that it waits for have started. The compute threads call this
// (`meet_computing` synchronizes them); THREADS is the first of them.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

DEVICE void tell_next(int* flag) {
  meet_computing();
  if (threadIdx.x == THREADS) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
DEVICE void wait_for_beginning(int* flag) {
  if (threadIdx.x == THREADS) {
    int is_there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
    } while (!is_there);
    *flag = 0;
  }
  meet_computing();
}

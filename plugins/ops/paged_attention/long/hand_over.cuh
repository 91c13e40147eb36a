// What has been merged of a context's beginning is handed to the next thread block by a flag, which is zero before and
// after. Who waits has a greater number, so all that it waits for have started. By those who compute (`meet_computing`), of
// whom THREADS is the first.
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

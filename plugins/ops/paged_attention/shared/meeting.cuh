// Synchronization, once per launch, of the thread blocks that share a context: a counter that is zero before and after.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

// One thread of each of `count`: what the others stored before they came may be read afterwards.
DEVICE void wait_for_others(int* counter, int count) {
  int arrived;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(arrived)
               : "l"(counter)
               : "memory");
  for (++arrived; arrived < count;) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
  }
}

// The same thread, when all have met: how many had come or left before.
DEVICE int count_leaving(int* counter) {
  int left;
  asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], 1;"
               : "=r"(left)
               : "l"(counter)
               : "memory");
  return left;
}

// The last one sets the counter to zero.
DEVICE void leave_others(int* counter, int count) {
  if (count_leaving(counter) == 2 * count - 1) *counter = 0;
}

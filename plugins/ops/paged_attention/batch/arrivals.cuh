// Synchronization of the warps of batch.cu that share a context: a counter that is zero before and after a launch.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

// The number of warps of a context that arrived before; what they stored may be read.
DEVICE int arrive_at(int* counter) {
  int before = 0;
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
  }
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before;
}

// Waits until so many have arrived, of which `before` had come before this one; what they stored may be read.
DEVICE void wait_for_parts(const int* counter, int count, int before) {
  if (threadIdx.x == 0 && before + 1 < count) {
    int arrived = 0;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < count);
  }
  __syncwarp();
}

// One of those that merge waits no more. Returns how many have come or gone before, in the first lane.
DEVICE int leave_parts(int* counter) {
  int left = 0;
  if (threadIdx.x == 0) {
    asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], 1;" : "=r"(left) : "l"(counter) : "memory");
  }
  return left;
}

// The last one to leave sets the counter to zero. `all`: parts that came and mergers that leave.
DEVICE void clear_counter(int* counter, int left, int all) {
  if (threadIdx.x == 0 && left == all - 1) *counter = 0;
}

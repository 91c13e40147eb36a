// Wrappers for the PTX instructions of thread block clusters: meetings, and what a block writes to another's shared
// memory.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

// Says that this block's barriers are initialised, after barrier_init_fence. Relaxed: a release would have every
// warp wait for all its accesses of memory.
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

DEVICE u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Tells another block that something has been read; an address that remote_address has made. What this block has
// written may arrive there later: a release at the cluster's scope would do it, by a fence that waits 0.7 us.
DEVICE void barrier_arrive_remote(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes into another block's shared memory, counted by that block's barrier.
DEVICE void store_remote(u32 address, u32 barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}

// 8 bytes, likewise.
DEVICE void store_remote_pair(u32 address, u32 barrier, float a, float b) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
}

// copy_block for every block of a cluster that `blocks` has a bit of, to the same place and barrier of each.
DEVICE void copy_block_to(u16 blocks, u32 target, const void* source, u32 bytes, u32 barrier,
                          u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// The thread that fetches what other blocks give (landing.cuh): it looks at the counter as the threads that compute do
// without it, and has the copy engine bring what they need.
//
// What the copy engine reads and writes are accesses by another proxy than loads and stores:
// - It writes where threads have read and written. Each warp says on `room` that it has done so (a release), this
//   thread waits for all of them (an acquire) and fences the proxies. So one fence, on the path from their accesses
//   to the copy, orders all of them; in each of those threads it would cost 250 cycles an exchange.
// - It reads what other blocks stored, and they do not wait until that is visible before they count (exchange.cuh). So
//   values may be absent from a copy: who takes them sees it and reads again, by loads. Wrong would only be the value
//   of two layers before. Its place was cleared, by a store ahead of others whose results this block's threads have
//   read before they said that there is room, and so ahead of the fence behind that. A copy reads L2, where all stores
//   go, as the loads do that rely on the same order; and whole sectors of 32 bytes, which no value crosses.
//   The fence is ahead of the look: behind it, every exchange would be as much longer as it takes (8B 1.5 %).
// - Threads read what it wrote behind the barrier that counts its bytes, which makes them visible.
#pragma once

#include "backends/cuda/sm90/barriers.cuh"
#include "fused/decoder_layers/attend.cuh"

DEVICE void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void fetch(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Called by one thread.
DEVICE void fetch_all(const Shared& shared, u8* exchanged, int* counters, int num_layers, const int* cu_q,
                      const int* kv_lens) {
  wait_for_dependencies();
  fence_proxies();
  Exchange x;
  x.start(exchanged, __ldcg(counters + 1));
  const int tasks = attention::Extent(cu_q, kv_lens).units * NUM_KV_HEADS;
  const auto look = [&](int expected) {
    int arrived;
    do {
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counters + 32) : "memory");
    } while (arrived < expected);
  };
  int expected = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l) {
#pragma unroll 1
    for (int product = 0; product < 3; ++product) {  // QKV, gate and up, down
      const bool is_qkv = product == 0, is_down = product == 2;
      if (!is_qkv || l > 0) {
        const u32 bytes = is_down ? LANDING_BYTES<DownSize> : LANDING_BYTES<GateUpSize>;
        const u32 to_qkv = landing<QkvSize>(shared), to_gate = landing<GateUpSize>(shared);
        const u32 to = is_down ? landing<DownSize>(shared) : is_qkv ? to_qkv : to_gate;
        const int at = is_down ? ACTIVATED_AT : is_qkv ? int(x.other) + DOWN_AT : O_AT;
        barrier_wait(shared.room, parity);
        parity ^= 1;
        fence_proxies();
        look(expected - (is_qkv ? EARLY_QKV : EARLY));
        barrier_expect(shared.came, bytes);
        fetch(to, x.now + at, bytes, shared.came);
      }
      if (is_qkv) {
        expected += QkvSize::SHARERS;
        // The place of queries is free: what the previous layer's attention had there was taken before the output
        // projection, behind which there was room.
        int place = attention::first_place(0);
        if (place < tasks) look(expected - EARLY);
        u32 to = shared.tokens + attention::TILES_BYTES, barrier = shared.came_queries;
#pragma unroll 1
        for (; place < tasks && barrier < shared.came_queries + 8 * attention::TEAMS; barrier += 8) {
          const int head = attention::task_at(place, tasks) % NUM_KV_HEADS;
          const u8 *queries = x.now + Q_AT + head * QUERY_ROWS_BYTES, *keys = x.now + KV_AT + head * KEY_BYTES;
          const u32 keys_to = to + QUERY_ROWS_BYTES;
          barrier_expect(barrier, TEAM_LANDING);
          fetch(to, queries, QUERY_ROWS_BYTES, barrier);
          fetch(keys_to, keys, KEY_BYTES, barrier);
          fetch(keys_to + KEY_BYTES, keys + NUM_KV_HEADS * KEY_BYTES, KEY_BYTES, barrier);  // values
          to += TEAM_LANDING, place = attention::LENDS ? attention::first_place(1) : place + NUM_BLOCKS;
        }
        expected += NUM_KV_HEADS * attention::SLICES + OSize::SHARERS;
      } else {
        expected += is_down ? DownSize::SHARERS : GateUpSize::SHARERS;
      }
    }
    x.turn();
  }
}

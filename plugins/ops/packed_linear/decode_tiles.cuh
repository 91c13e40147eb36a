// Complete sums of the kernel for few tokens, and partial sums that a block passes to the next block.
#pragma once

#include "ops/packed_linear/decode_products.cuh"

// ---- partial sums passed from one block to the next ----

struct Handover {
  float4* sums;  // [blocks, TOKENS / 8, 128 threads]
  int* ready;    // [blocks]: 1 while a sum waits for the next block
};

DEVICE void hand_over(const Handover& h, const float (&sum)[TOKENS / 2]) {
  float4* to = h.sums + blockIdx.x * OCTETS * CONSUMERS + threadIdx.x;
#pragma unroll
  for (int j = 0; j < OCTETS; ++j) {
    to[j * CONSUMERS] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
  }
  __threadfence();
  meet();
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(h.ready + blockIdx.x) : "memory");
  }
}

DEVICE void take_over(const Handover& h, float (&sum)[TOKENS / 2]) {
  int* ready = h.ready + blockIdx.x - 1;
  if (threadIdx.x == 0) {
    int is_ready;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_ready) : "l"(ready) : "memory");
    } while (!is_ready);
    *ready = 0;  // reset for the next launch; the sums stay valid until then
  }
  meet();
  const float4* from = h.sums + (blockIdx.x - 1) * OCTETS * CONSUMERS + threadIdx.x;
#pragma unroll
  for (int j = 0; j < OCTETS; ++j) {
    const float4 part = __ldcg(from + j * CONSUMERS);
    sum[4 * j] = part.x, sum[4 * j + 1] = part.y, sum[4 * j + 2] = part.z, sum[4 * j + 3] = part.w;
  }
}

template <int ACTIVE>
DEVICE void multiply_tiles(const Shared& shared, Walk& walk, const Epilogue& e,
                           const Handover& handover, const Tokens& tokens, bool& has_waited) {
  // Constants of four slices, or of few rows and tokens where these have few, find room in registers and are
  // loaded before the products; so are those of pairs, which are alone on their multiprocessors. Of more, each slice's
  // are loaded when it is stored: four at a time were slower.
  constexpr int SLICES = ACTIVE * OCTETS;
  constexpr bool FITS = EPILOGUE == 0 && SHARERS > 1;
  constexpr bool IS_EARLY = SLICES <= 4 || (EPILOGUE != 2 && ROW_TILES + OCTETS <= 5) || FITS;
  constexpr int HELD = IS_EARLY ? SLICES : 1;
  const int warp = threadIdx.x / 32;
  Slice held[HELD];
  const auto load_rows = [&](int from) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      held[i].load_rows(e, walk.tile + (from + i) / OCTETS, warp, (from + i) % OCTETS);
    }
  };
  const auto load_tokens = [&] {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i].load_tokens(e);
  };
  const auto complete_tokens = [&] {
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i].complete_tokens(e);
  };
  if (IS_EARLY) load_rows(0);
  const auto arrived = [&] {
    if (IS_EARLY) load_tokens();
  };
  if (has_waited) {
    arrived();
  } else {
    tokens.wait(shared, walk, arrived);
  }
  has_waited = true;
  float sum[ACTIVE][TOKENS / 2];
#if SPLIT == 0
  if (walk.first > 0) take_over(handover, sum[0]);
#endif
  multiply<ACTIVE>(shared, walk, sum, [&] {
    if (IS_EARLY) complete_tokens();
  });
#if SPLIT == 0
  if (walk.last < walk.chunks) {
    hand_over(handover, sum[0]);
    return;
  }
#endif
#pragma unroll
  for (int from = 0; from < SLICES; from += HELD) {
    if (!IS_EARLY) {
      load_rows(from);
      load_tokens();
      complete_tokens();
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      held[i].store(e, &sum[(from + i) / OCTETS][4 * ((from + i) % OCTETS)]);
    }
  }
}

template <int ACTIVE>
DEVICE void multiply_active(const Shared& shared, Walk& walk, const Epilogue& e,
                            const Handover& handover, const Tokens& tokens, bool& has_waited) {
  if (walk.active == ACTIVE) {
    multiply_tiles<ACTIVE>(shared, walk, e, handover, tokens, has_waited);
  } else if constexpr (ACTIVE > 1) {
    multiply_active<ACTIVE - 1>(shared, walk, e, handover, tokens, has_waited);
  }
}

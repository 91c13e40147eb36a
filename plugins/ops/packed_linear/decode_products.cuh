// Products of the kernel for few tokens: four warps multiply the contents of the ring, in intervals.
#pragma once

#include "ops/packed_linear/decode_norm.cuh"

// Rows of one group of 16 and eight tokens: what the epilogue needs besides the sums.
struct Slice {
  int group, token;
  RowConstants rows;
  TokenConstants tokens[2];

  DEVICE void load_rows(const Epilogue& e, int tile, int quarter, int octet) {
    group = 4 * tile + quarter;
    token = first_token() + 8 * octet + 2 * (threadIdx.x & 3);
    rows = ::load_rows(e, group);
  }
  DEVICE void load_tokens(const Epilogue& e) {
    tokens[0] = load_token(e, group, token);
    tokens[1] = load_token(e, group, token + 1);
  }
  DEVICE void complete_tokens(const Epilogue& e) {
    complete_token(e, group, tokens[0]);
    complete_token(e, group, tokens[1]);
  }
  DEVICE void store(const Epilogue& e, const float* sum) const {
    store_pair(e, rows, tokens[0], group, token, sum[0], sum[2]);
    store_pair(e, rows, tokens[1], group, token + 1, sum[1], sum[3]);
  }
};

// With tiles of 8 tokens one half of a chunk of 4-bit weights is expanded while the half before is multiplied. With
// larger tiles a chunk is expanded and multiplied as a whole, which is faster there.
constexpr int CHUNK_PARTS = TOKENS == 8 ? 2 : 1, PART_PRODUCTS = 8 / CHUNK_PARTS;

// Starts the products of one part of a chunk of 4-bit weights.
template <int ACTIVE>
DEVICE void start_part(const Mxfp4Chunk (&chunk)[ACTIVE], int nth, u32 tokens,
                       float (&part)[ACTIVE][TOKENS / 2], bool is_first) {
  u32 a[ACTIVE][PART_PRODUCTS][4];
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) chunk[r].expand(nth * PART_PRODUCTS, a[r]);
  product_fence();
#pragma unroll
  for (int i = 0; i < PART_PRODUCTS; ++i) {
    const int k = nth * PART_PRODUCTS + i;
    const u64 b = operand(tokens + k / 4 * X_BYTES) + 2 * (k % 4);
#pragma unroll
    for (int r = 0; r < ACTIVE; ++r) {
      HeldProduct<TOKENS>::add(part[r], a[r][i], b, !(is_first && k == 0));
    }
  }
  product_commit();
}

template <int ACTIVE>
DEVICE void wait_for_products(float (&part)[ACTIVE][TOKENS / 2]) {
  product_wait<0>();
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) keep_order(part[r]);
}

// Computes the products of one slot of 4-bit weights and waits for them. Registers that running products read
// must not be written, or ptxas would make every product wait for the previous one: so each part has its own.
template <int ACTIVE>
DEVICE void multiply_expanded(u32 table, u32 stage, float (&part)[ACTIVE][TOKENS / 2],
                              bool is_first) {
  const u32 octets = stage + threadIdx.x / 32 * (2 * MXFP4_OCTET_BYTES);  // of the warp's rows
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    Mxfp4Chunk chunk[ACTIVE];
#pragma unroll
    for (int r = 0; r < ACTIVE; ++r) chunk[r].load(table, octets + (r * CHUNKS + c) * BLOCK_BYTES);
#pragma unroll
    for (int nth = 0; nth < CHUNK_PARTS; ++nth) {
      start_part<ACTIVE>(chunk, nth, stage + WEIGHT_BYTES + 2 * c * X_BYTES, part,
                         is_first && c == 0);
    }
    if (CHUNK_PARTS == 1 || c + 1 == CHUNKS) wait_for_products(part);
  }
}

// Starts one slot's products into `part`, after those started before.
template <int ACTIVE>
DEVICE void start_slot(const Shared& shared, const Walk& walk, float (&part)[ACTIVE][TOKENS / 2],
                       bool is_first) {
  if (FILL > 0) barrier_wait(shared.first + 8 * walk.slot, 0);  // already over after the first pass
  barrier_wait(shared.full + 8 * walk.slot, walk.phase);
  // From lane 0, so that the compiler knows descriptors to be uniform in the warp.
  const u32 stage = __shfl_sync(~0u, shared.ring + walk.slot * STAGE_BYTES, 0);
  const u32 tokens = __shfl_sync(~0u, shared.tokens + walk.chunk * X_BYTES, 0);
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) keep_order(part[r]);
  if constexpr (MXFP4) {
    multiply_expanded<ACTIVE>(shared.table, stage, part, is_first);
    return;
  }
  product_fence();
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const u64 b = operand(NORM ? tokens + c * X_BYTES : stage + WEIGHT_BYTES + c * X_BYTES);
    const u64 a = operand(stage + c * BLOCK_BYTES);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) {
        Product<INPUT_TYPE, TOKENS>::add(part[r], a + r * (CHUNKS * BLOCK_BYTES / 16) + 2 * k,
                                         b + 2 * k, !(is_first && c == 0 && k == 0));
      }
    }
  }
  product_commit();
}

// Tells the copying warp, and those of blocks that copy to the slot, too.
DEVICE void free_slot(const Shared& shared, int slot) {
  if (slot < 0 || threadIdx.x % 32 >= SHARERS) return;
  const u32 empty = shared.empty + 8 * slot;
  if (SHARERS == 1) barrier_arrive(empty);
  else barrier_arrive_remote(remote_address(empty, threadIdx.x % 32));
}

template <int ACTIVE>
DEVICE void finish_products(float (&part)[ACTIVE][TOKENS / 2]) {
  if (!MXFP4) product_wait<0>();
#pragma unroll
  for (int r = 0; r < ACTIVE; ++r) keep_order(part[r]);
}

// Computes one interval into `part`. While its first slot is multiplied, `use` processes the previous interval,
// which is in `before` (first chunk `chunk_before`, negative if there is none: then `meanwhile` runs).
template <int ACTIVE, class Use, class Meanwhile>
DEVICE void multiply_interval(const Shared& shared, Walk& walk, float (&part)[ACTIVE][TOKENS / 2],
                              float (&before)[ACTIVE][TOKENS / 2], int& chunk_before, int& busy,
                              const Use& use, const Meanwhile& meanwhile) {
  const int begin = walk.chunk, end = min(begin + INTERVAL, walk.last);
#pragma unroll
  for (int i = 0; i < INTERVAL / CHUNKS; ++i) {
    if (i > 0 && walk.chunk >= end) break;
    start_slot<ACTIVE>(shared, walk, part, i == 0);
    if (i == 0 && chunk_before < 0) meanwhile();
    if (!MXFP4) product_wait<1>();
    free_slot(shared, busy);
    busy = walk.slot;
    if (i == 0 && chunk_before >= 0) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) keep_order(before[r]);
      use(before, chunk_before);
    }
    walk.chunk += CHUNKS;
    walk.next_slot();
  }
  chunk_before = begin;
}

// All of the block's intervals of ACTIVE row tiles, in order; use(part, first chunk) processes each.
template <int ACTIVE, class Use, class Meanwhile>
DEVICE void multiply_intervals(const Shared& shared, Walk& walk, const Use& use,
                               const Meanwhile& meanwhile) {
  float even[ACTIVE][TOKENS / 2], odd[ACTIVE][TOKENS / 2];
  int before = -1, busy = -1;
  while (true) {
    multiply_interval<ACTIVE>(shared, walk, even, odd, before, busy, use,
                              meanwhile);
    if (walk.chunk >= walk.last) {
      finish_products(even);
      use(even, before);
      break;
    }
    multiply_interval<ACTIVE>(shared, walk, odd, even, before, busy, use,
                              meanwhile);
    if (walk.chunk >= walk.last) {
      finish_products(odd);
      use(odd, before);
      break;
    }
  }
  free_slot(shared, busy);
}

// The sums of ACTIVE row tiles over the block's chunks.
template <int ACTIVE, class Meanwhile>
DEVICE void multiply(const Shared& shared, Walk& walk, float (&sum)[ACTIVE][TOKENS / 2],
                     const Meanwhile& meanwhile) {
  if constexpr (!IS_FP8) {
    int busy = -1;
#pragma unroll 1
    do {  // a loop that might not run would have the compiler wait for each product
      start_slot<ACTIVE>(shared, walk, sum, walk.chunk == 0);
      if (busy < 0) meanwhile();
      product_wait<1>();
      free_slot(shared, busy);
      busy = walk.slot;
      walk.chunk += CHUNKS;
      walk.next_slot();
    } while (walk.chunk < walk.last);
    finish_products(sum);
    free_slot(shared, busy);
  } else {
    const auto add = [&](float (&part)[ACTIVE][TOKENS / 2], int chunk) {
#pragma unroll
      for (int r = 0; r < ACTIVE; ++r) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
          sum[r][i] = chunk == 0 ? part[r][i] : __fadd_rn(sum[r][i], part[r][i]);
        }
      }
    };
    multiply_intervals<ACTIVE>(shared, walk, add, meanwhile);
  }
}

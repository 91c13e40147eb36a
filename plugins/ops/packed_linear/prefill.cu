// Packed matrix product for many tokens: out[n, r] = sum over k of x[n, k] * weight[r, k].
//
// One persistent thread block per multiprocessor. Two warps feed shared memory, one with packed
// weight blocks, one with token tiles; two warpgroups multiply. A tile is 128 * WG_TILES weight
// rows by TILE_TOKENS tokens; each warpgroup has WG_TILES tiles of 64 rows.
//
// Order of summation (that of every packed product): FP8 in intervals of 512, each a chain of wgmma
// from zero, added to the sum in float32; 16-bit types in one chain. So that registers are needed for only one
// row tile's interval besides the sums, the interval's token chunks stay in shared memory while a warpgroup
// processes its row tiles one after another.
//
// Macros: INPUT_TYPE (E4M3, BF16 or FP16), EXPANDED (1: expand.cu writes the weights right before),
// WG_TILES, TILE_TOKENS, A_STAGES, B_STAGES, EVEN (1: all blocks have equal shares of K, see prefill_load.cuh), LEAVES
// (leaves.cuh), and those of epilogue.cuh.

#include "ops/packed_linear/prefill_handover.cuh"

// One warpgroup's position in the rings. A slot is released when the products that read it are
// done, which is known one chunk later.
struct Consumer {
  const Shared& shared;
  int warpgroup;
  Ring<A_STAGES> a, a_done;  // next to multiply, next to release
  Ring<B_STAGES> b, b_done;

  DEVICE void release_a(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.a_empty + 8 * slot);
  }
  DEVICE void release_b(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.b_empty + 8 * slot);
  }

  // 64 rows x TILE_TOKENS tokens x one chunk, added to `sum` or replacing it.
  DEVICE void multiply(float (&sum)[TILE_TOKENS / 2], int b_slot, bool is_first) const {
    const u64 rows = operand(shared.a + a.slot * A_BYTES + warpgroup * BLOCK_BYTES);
    const u64 tokens = operand(shared.b + b_slot * B_BYTES);
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Product<INPUT_TYPE, TILE_TOKENS>::add(sum, rows + 2 * k, tokens + 2 * k, k > 0 || !is_first);
    }
    product_commit();
  }

  DEVICE void release(bool is_last) {
    release_a(a_done.slot);
    a_done.advance();
    if (is_last) {
      release_b(b_done.slot);
      b_done.advance();
    }
  }

  // Begins part = 64 rows x TILE_TOKENS tokens x `count` chunks. The first row tile waits for the
  // tokens, the last one releases them. Slots are released one product later or, with `hold`, in
  // `end`: then all products run while the caller does other work.
  DEVICE void begin(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
#pragma unroll 1
    for (int chunk = 0; chunk < count; ++chunk) {
      if (tile == 0) barrier_wait(shared.b_full + 8 * b.slot, b.parity);
      barrier_wait(shared.a_full + 8 * a.slot, a.parity);
      multiply(part, b.slot, chunk == 0);
      if (chunk > 0 && !hold) {
        product_wait<1>();
        release(tile == LAST);
      }
      a.advance();
      b.advance();
    }
  }
  DEVICE void end(float (&part)[TILE_TOKENS / 2], int count, int tile, bool hold) {
    product_wait<0>();
    keep_order(part);
    const int left = hold ? count : 1;
#pragma unroll 1
    for (int i = 0; i < left; ++i) release(tile == LAST);
  }

  // All chunks in one chain per row tile.
  DEVICE void chains(float (&sum)[WG_TILES][TILE_TOKENS / 2], int chunks) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(shared.b_full + 8 * b.slot, b.parity);
#pragma unroll
      for (int tile = 0; tile < WG_TILES; ++tile) {
        barrier_wait(shared.a_full + 8 * a.slot, a.parity);
        multiply(sum[tile], b.slot, chunk == 0);
        if (chunk > 0 || tile > 0) {
          product_wait<1>();
          release(tile == 0);  // of the previous product, which was the last of its chunk if this is
        }                      // the first of the next
        a.advance();
      }
      b.advance();
    }
    product_wait<0>();
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) keep_order(sum[tile]);
    release(true);
  }
};

// Stores one row tile of a unit (the tile of work of a block), or leaves its sums to the next block.
struct Store {
  const Epilogue& epilogue;
  const Handover& handover;
  const Shared& shared;
  const Work& work;
  int warpgroup;

  DEVICE void keep(const TokenValues<TILE_TOKENS>& token_values) const {
    token_values.keep(values());
  }
  DEVICE u32 values() const {
    return shared.values + warpgroup * TokenValues<TILE_TOKENS>::BYTES;
  }
  DEVICE void leave(const float (&sum)[TILE_TOKENS / 2], int unit, int tile, bool is_part) const {
    if (EVEN && is_part) {
      handover.leave(sum, tile);
      return;
    }
    int row_block, token;
    work.at(unit, row_block, token);
    store_tile<TILE_TOKENS>(epilogue, sum, (row_block * WARPGROUPS + warpgroup) * WG_TILES + tile,
                            work.row_tiles, token, shared.staging + warpgroup * STAGING_BYTES,
                            values(), warpgroup);
  }
};

DEVICE void clear(float (&sum)[TILE_TOKENS / 2]) {  // to the value whose addition changes nothing
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = -0.0f;
}

DEVICE void add(float (&sum)[TILE_TOKENS / 2], const float (&part)[TILE_TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
}

// Sums are stored while other products run: those of the first of two row tiles during the last
// interval of the second, those of the last row tile during the first interval of the next unit. So are
// sums handed on and taken over.
DEVICE void consume_intervals(Consumer& consumer, const Work& work, const Store& store) {
  float sum[WG_TILES][TILE_TOKENS / 2], part[TILE_TOKENS / 2];
#pragma unroll
  for (int tile = 0; tile < WG_TILES; ++tile) clear(sum[tile]);
  int before = -1;
  bool is_part = false;  // the unit before, whose sums go to the next block
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(walk.unit));
#pragma unroll 1
    for (int start = walk.first; start < walk.last; start += INTERVAL) {
      const int count = min(INTERVAL, walk.last - start);
      const bool is_first = start == walk.first, is_last = start + INTERVAL >= walk.last;
      const bool takes = EVEN && is_first && walk.first > 0;  // what the block before has left
      const Ring<B_STAGES> b_start = consumer.b;
      const bool store_before = is_first && before >= 0;
      consumer.begin(part, count, 0, store_before);
      if (store_before) {
        store.leave(sum[LAST], before, LAST, is_part);
        clear(sum[LAST]);
      }
      if (is_first) store.keep(token_values);
      if (takes) store.handover.take(sum[0], 0, work.token_tiles());
      consumer.end(part, count, 0, store_before);
      add(sum[0], part);
      if (WG_TILES == 1) continue;
      consumer.b = b_start;
      consumer.begin(part, count, LAST, is_last);
      if (takes) store.handover.take(sum[LAST], LAST, work.token_tiles());
      if (is_last) {
        store.leave(sum[0], walk.unit, 0, EVEN && walk.last < work.chunks);
        clear(sum[0]);
      }
      consumer.end(part, count, LAST, is_last);
      add(sum[LAST], part);
    }
    before = walk.unit;
    is_part = EVEN && walk.last < work.chunks;
  }
  if (before >= 0) store.leave(sum[LAST], before, LAST, is_part);
}

DEVICE void consume_chains(Consumer& consumer, const Work& work, const Store& store) {
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(walk.unit));
    float sum[WG_TILES][TILE_TOKENS / 2];
    consumer.chains(sum, work.chunks);
    store.keep(token_values);
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) store.leave(sum[tile], walk.unit, tile, false);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill(const __grid_constant__ TensorMap x, const u8* __restrict__ weight, int row_tiles,
            int chunks, EPILOGUE_PARAMETERS HANDOVER_PARAMETERS) {
  extern __shared__ __align__(1024) u8 raw[];  // the alignment that swizzled blocks need
  if (!WRITES_CACHE) launch_dependents();
  const Shared shared(shared_address(raw));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < A_STAGES; ++i) {
      barrier_init(shared.a_full + 8 * i, 1);
      barrier_init(shared.a_empty + 8 * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < B_STAGES; ++i) {
      barrier_init(shared.b_full + 8 * i, 1);
      barrier_init(shared.b_empty + 8 * i, CONSUMER_WARPS);
    }
    barrier_init_fence();
    prefetch_map(&x);
  }
  __syncthreads();
  const Work work{row_tiles, chunks, tokens};
  if (warp >= CONSUMER_WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == CONSUMER_WARPS && lane == 0) {
      load_weights(shared, work, weight);
    } else if (warp == CONSUMER_WARPS + 1 && lane == 0) {
      wait_for_dependencies();
      if (WRITES_CACHE) launch_dependents();
      load_tokens(shared, work, &x);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warpgroup = warp / 4;
    const Epilogue epilogue{EPILOGUE_VALUES};
    Consumer consumer{shared, warpgroup, {}, {}, {}, {}};
    const Handover handover{HANDOVER_VALUES};
    const Store store{epilogue, handover, shared, work, warpgroup};
    wait_for_dependencies();
    if constexpr (IS_FP8) {
      consume_intervals(consumer, work, store);
    } else {
      consume_chains(consumer, work, store);
    }
  }
}

// Paged attention of context chunks: many query tokens of a request against its cached keys.
//
// Computes the same bits as the Triton kernels of this folder (triton_state.py says how), like
// generation.cu, whose work items of tiles (`unit`, unit_state.cuh) it computes for 128 rows: query tokens
// times the query heads of one KV head.
//
// Each persistent thread block (one per multiprocessor) processes one item after another: a block of query
// tokens for one KV head (chunk_load.cuh). Four warps load and convert keys and values through rings of STAGES
// tiles; two warpgroups compute 64 rows each. The logits of a tile and the values of the previous tile are
// products that start together, and what one warpgroup does between them overlaps with those of the other.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads
// for each), SIZE (of a head, a multiple of 64), TOKENS_PER_BLOCK (a power of two), STAGES, UNIT,
// K_SCALE, V_SCALE, STATIC.
// Grid: at most one per multiprocessor. `counter` is zero before and after.

#include "ops/paged_attention/chunk_load.cuh"
#include "ops/paged_attention/output.cuh"
#include "ops/paged_attention/unit_state.cuh"

// The row of an item that a thread holds in a product; the second is 8 further.
DEVICE int row_of(int r) {
  const int thread = thread_from_here();
  return (thread - THREADS) / 32 * 16 + thread % 32 / 4 + 8 * r;
}

// Appends a work item's values and states to what has been merged to the left of it.
DEVICE void merge(State& all, const float (&acc)[SIZE / 2], const float (&largest)[2],
                  const float (&total)[2]) {
  float left[2], right[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = fmaxf(all.largest[r], largest[r]), base = finite(top);
    left[r] = exp2(__fsub_rn(all.largest[r], base));
    right[r] = exp2(__fsub_rn(largest[r], base));
    all.total[r] = __fmaf_rn(all.total[r], left[r], __fmul_rn(total[r], right[r]));
    all.largest[r] = top;
  }
#pragma unroll
  for (int i = 0; i < SIZE / 2; ++i) {
    const int r = i / 2 % 2;
    all.acc[i] = __fmaf_rn(all.acc[i], left[r], __fmul_rn(acc[i], right[r]));
  }
}

DEVICE void store(const State& all, const volatile Item& item, OUT_TYPE::Storage* out,
                  float value_scale, float quanta) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    if (row >= item.rows) continue;
    const long long token = item.token + row / GROUP;
    OUT_TYPE::Storage* to = out + (token * HEADS + item.head) * (GROUP * SIZE) + row % GROUP * SIZE +
                            2 * (threadIdx.x % 4);
    const float factor = __fdiv_rn(value_scale, all.total[r]);
#pragma unroll
    for (int j = 0; j < SIZE / 8; ++j) {
      const float* x = &all.acc[4 * j + 2 * r];
      store_pair(to + 8 * j, finish_pair(x[0], x[1], factor, quanta));
    }
  }
}

DEVICE void wait_for_operand(u32 barrier, u32 parity) {
  barrier_wait(barrier, parity);
  shared_fence();  // written by threads, read by tensor cores
}

DEVICE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

extern "C" __global__ void __launch_bounds__(THREADS * (1 + WARPGROUPS), 1)
    chunk(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
          const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
          const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
          int* counter, float softmax_scale, int table_stride, int num_requests, int min_tokens) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Shared shared = {shared_address(memory), memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full_keys(i), THREADS / 32);
      barrier_init(shared.full_values(i), THREADS / 32);
      barrier_init(shared.empty_keys(i), 4 * WARPGROUPS);
      barrier_init(shared.empty_values(i), 4 * WARPGROUPS);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.full_item(i), THREADS / 32);
      barrier_init(shared.empty_item(i), 4 * WARPGROUPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_dependencies();
  if (threadIdx.x < THREADS) {  // leave registers to the warps that compute: 504 are three times 168
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    const Step step = {position_ids, cu_q,         kv_lens,   block_tables,
                       table_stride, num_requests, min_tokens};
    bring_items(shared, step, q, cache, counter);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  Ring<STAGES> keys, values;
#pragma unroll 1
  for (u32 nth = 0;; ++nth) {
    barrier_wait(shared.full_item(nth % 2), nth / 2 % 2);
    const volatile Item& item = shared.item(nth % 2);
    const int tiles = item.tiles, full_tiles = item.full_tiles;
    if (tiles == 0) break;
    const u32 queries = shared.queries(nth % 2, threadIdx.x / 128 - 1);
    int last_key[2];  // that a row sees
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = item.token + min(row_of(r), item.rows - 1) / GROUP;
      last_key[r] = min(load_int(position_ids + token), item.limit - 1);
    }
    State all, unit;
    float s[32];
    u32 weights[16];
    Softening softening;
    const auto find_base = [&](int tile) {
      if (tile < full_tiles) {
        softening.find_base<false>(unit, s, {}, scale);
      } else {
        int seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) seen[r] = last_key[r] - tile * KEYS;
        softening.find_base<true>(unit, s, seen, scale);
      }
    };
    const auto weigh = [&] {
      softening.weigh(s, weights, scale);
      softening.add_weights(unit);
    };
    bool is_first = true;  // tile of its work item
    const auto multiply_keys = [&] {
      wait_for_operand(shared.full_keys(keys.slot), keys.parity);
      start_logits(s, queries, shared.keys(keys.slot));
    };
    const auto release_keys = [&] {
      keep_order(s);
      release(shared.empty_keys(keys.slot));
      keys.advance();
    };
    const auto multiply_values = [&] {
      wait_for_operand(shared.full_values(values.slot), values.parity);
      start_values(unit, weights, shared.values(values.slot), !is_first);
    };
    const auto release_values = [&] {
      keep_order(unit.acc);
      release(shared.empty_values(values.slot));
      values.advance();
    };
    all.clear();
    unit.clear_states();
    int next_unit = 1, unit_end = 1;
    multiply_keys();
    product_wait<0>();
    release_keys();
    find_base(0);
    weigh();
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
      multiply_keys();
      multiply_values();
      product_wait<1>();
      release_keys();
      is_first = tile == unit_end;
      float largest[2], total[2];  // of the work item whose values are being added
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = unit.largest[r], total[r] = unit.total[r];
      if (is_first) {
        unit.clear_states();
        unit_end = unit_start(++next_unit);
      }
      find_base(tile);
      product_wait<0>();
      release_values();
      if (is_first) merge(all, unit.acc, largest, total);
      weigh();
      if (!is_first) softening.fade_values(unit);
    }
    multiply_values();
    product_wait<0>();
    release_values();
    merge(all, unit.acc, unit.largest, unit.total);
    // Read here, because keeping them through the loop would cost registers.
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    store(all, item, out, value_scale, quanta);
    release(shared.empty_item(nth % 2));
  }
}

// Paged attention of context chunks with FP8 products: tokens before their request's `context_ends`, the others being
// chunk.cu's. What a token is computed with follows from its sequence alone, and so do its bits; fp8_reference.py has
// the arithmetic.
//
// Items and rings are those of chunk.cu (chunk_load.cuh). images_fp8.cu has written keys and values as operands, and
// each warpgroup loads its queries itself. Values have one more dimension, ones, so that products give sums of weights, too.
//
// Macros: those of chunk.cu, with FP8_PRODUCTS 1, TILE_KEYS 128, MOST_UNIT (in such tiles), RAISE and WEIGHT_POWER.
// Grid: at most one per multiprocessor. `counter` is zero before and after.

#include "ops/paged_attention/chunk_images.cuh"
#include "ops/paged_attention/fp8_merge.cuh"

struct Fp8Rings {
  Ring<STAGES> keys, values;
};

// Attends to tiles [0, tiles): `all` is what is merged of all work items but the last, `unit` the last one. From
// full_tiles on rows see keys up to last_key only.
DEVICE void attend(const Shared& shared, Fp8Rings& rings, const Queries& queries, int tiles, int full_tiles,
                   const int (&last_key)[2], const float (&scale)[2], Merged& all, Fp8State& unit) {
  auto& keys = rings.keys;
  auto& values = rings.values;
  float s[LOGITS];
  u32 weights[WORDS];
  Fp8Softening softening;
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
  bool is_first = true;  // tile of its work item
  const auto begin_unit = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) unit.base[r] = minus_infinity();
  };
  const auto multiply_keys = [&] {
    barrier_wait(shared.full_keys(keys.slot), keys.parity);
    keep_order(unit.sums);  // all arithmetic with them is before the products, or these would wait for each other
    start_logits(s, queries, shared.keys(keys.slot));
  };
  const auto release_keys = [&] {
    keep_order(s);
    release(shared.empty_keys(keys.slot));
    keys.advance();
  };
  const auto multiply_values = [&] {
    barrier_wait(shared.full_values(values.slot), values.parity);
    start_values(unit, weights, shared.values(values.slot), !is_first);
  };
  const auto release_values = [&] {
    keep_order(unit.sums);
    release(shared.empty_values(values.slot));
    values.advance();
  };
  all.clear();
  begin_unit();
  int next_unit = 1, unit_end = 1;
  multiply_keys();
  product_wait<0>();
  release_keys();
  find_base(0);
  softening.weigh(s, weights, scale);
#pragma unroll 1
  for (int tile = 1; tile < tiles; ++tile) {
    multiply_keys();
    multiply_values();
    product_wait<1>();
    release_keys();
    is_first = tile == unit_end;
    const float base[2] = {unit.base[0], unit.base[1]};  // of the work item whose values are being added
    if (is_first) {
      begin_unit();
      unit_end = unit_start(++next_unit);
    }
    find_base(tile);
    product_wait<0>();
    release_values();
    if (is_first) {
      const float total[2] = {unit.total(0), unit.total(1)};
      all.append(unit, base, total, false);
    }
    softening.weigh(s, weights, scale);
    if (!is_first && softening.fades) softening.fade_sums(unit);
  }
  multiply_values();
  product_wait<0>();
  release_values();
}

extern "C" __global__ void __launch_bounds__(THREADS * (1 + WARPGROUPS), 1)
    chunk_fp8(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
              const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
              const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
              const int* context_ends, int* counter, float softmax_scale, int table_stride,
              int num_requests, int min_tokens, u8* images, int room_tiles, int first_head,
              int num_heads, int first_chunk, int num_chunks) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  constexpr int MERGED = WARPGROUPS * MERGED_BYTES;
  const Shared shared = {shared_address(memory) + MERGED, memory + MERGED};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full_keys(i), 1);
      barrier_init(shared.full_values(i), 1);
      barrier_init(shared.empty_keys(i), 4 * WARPGROUPS);
      barrier_init(shared.empty_values(i), 4 * WARPGROUPS);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.full_item(i), THREADS / 32);
      barrier_init(shared.empty_item(i), 4 * WARPGROUPS);
    }
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < STAGES * 64; i += blockDim.x) {  // a dimension of ones and seven of zeros
    const u32 x = i % 64 < KEYS / 16 ? 0x38383838u : 0u;
    store_shared(shared.values(i / 64) + IMAGE_BYTES + i % 64 * 16, x, x, x, x);
  }
  shared_fence();
  __syncthreads();
  wait_for_dependencies();
  if (threadIdx.x < THREADS) {  // leave registers to the warps that compute: 504 are three times 168
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const Step step = {position_ids, cu_q,      kv_lens,      block_tables, table_stride, num_requests,
                       min_tokens,   first_head, num_heads,   context_ends, first_chunk,  num_chunks};
    Imaged source = {{images, room_tiles, num_heads}};
    bring_items(shared, step, q, source, counter);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  const float key_scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  Fp8Rings rings;
  Merged all;
  all.at = shared_address(memory) + (threadIdx.x / 128 - 1) * MERGED_BYTES + threadIdx.x % 128 * 16;
#pragma unroll 1
  for (u32 nth = 0;; ++nth) {
    barrier_wait(shared.full_item(nth % 2), nth / 2 % 2);
    const volatile Item& item = shared.item(nth % 2);
    const int tiles = item.tiles, full_tiles = item.full_tiles;
    if (tiles == 0) break;
    Queries queries;
    queries.load(q, item);
    int last_key[2];  // that a row sees
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = item.token + min(row_of(r), item.rows - 1) / GROUP;
      last_key[r] = min(load_int(position_ids + token), item.limit - 1);
      scale[r] = __fmul_rn(key_scale, queries.unit[r]);
    }
    Fp8State unit;
    attend(shared, rings, queries, tiles, full_tiles, last_key, scale, all, unit);
    const float total[2] = {unit.total(0), unit.total(1)};
    all.append(unit, unit.base, total, true);
    State merged;
#pragma unroll
    for (int r = 0; r < 2; ++r) merged.total[r] = all.total[r];
#pragma unroll
    for (int i = 0; i < SIZE / 2; ++i) merged.acc[i] = unit.sums[i];
    // Read here, because keeping them through the loop would cost registers.
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    store(merged, item, out, value_scale, quanta);
    release(shared.empty_item(nth % 2));
  }
}

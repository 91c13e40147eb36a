// Paged attention of context chunks with FP8 products: tokens before their request's `context_ends`; chunk.cu computes
// the others. The arithmetic of a token depends on its sequence alone, and so do its bits; reference.py has the
// arithmetic.
//
// Items and rings are those of chunk.cu (chunk/load.cuh). images_fp8.cu has written keys and values as operands, and
// each warpgroup loads its own queries. Values have one more dimension, all ones, so that the products also give the
// sums of softmax weights.
//
// Macros: those of chunk.cu, with FP8_PRODUCTS 1, TILE_KEYS 128, CHAIN, UNIT and MOST_UNIT (in such tiles), RAISE and
// WEIGHT_POWER; EVERY_TOKEN 1 if all tokens have FP8 products, whatever `context_ends` says.
// Grid: at most one thread block per multiprocessor. `counter` is zero before and after.

#include "ops/paged_attention/chunk/images.cuh"
#include "ops/paged_attention/chunk_fp8/merge.cuh"

extern "C" __global__ void __launch_bounds__(THREADS * (1 + WARPGROUPS), 1)
    chunk_fp8(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
              const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
              const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
              const int* context_ends, int* counter, float softmax_scale, int table_stride,
              int num_requests, int min_tokens, u8* images, int room_tiles, int first_head,
              int num_heads, int first_chunk, int num_chunks) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  constexpr int MERGED = LEVELS * WARPGROUPS * MERGED_BYTES;
  const Shared shared = {shared_address(memory) + MERGED, memory + MERGED};
  init_barriers(shared, 1);
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
  Rings rings;
  Merged all;
  all.memory = shared_address(memory);
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
    Fp8State chain;
    attend<Fp8Softening, Chains>(shared, rings, queries, tiles, full_tiles, last_key, scale, all, chain);
    float total[2];
    all.append(chain, chain.base, total, true);
    State merged;
#pragma unroll
    for (int r = 0; r < 2; ++r) merged.total[r] = total[r];
#pragma unroll
    for (int i = 0; i < SIZE / 2; ++i) merged.acc[i] = chain.sums[i];
    // Read here, because keeping them through the loop would cost registers.
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    store(merged, item, out, value_scale, quanta);
    release(shared.empty_item(nth % 2));
  }
}

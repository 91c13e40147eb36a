// Paged attention of context chunks: many query tokens of a request against its cached keys.
//
// Computes the same bits as the Triton kernels (triton/state.py says how) and as generation.cu: the same work items
// (ranges of tiles, `unit` in the code, shared/unit_state.cuh), here for 128 rows (query tokens times the query heads of
// one KV head).
//
// Each persistent thread block (one per multiprocessor) processes one item after another: a block of query tokens for
// one KV head (load.cuh). Four producer warps load and convert keys and values through rings of STAGES tiles; two
// compute warpgroups process 64 rows each. The product for a tile's logits and the product with the previous tile's
// values are issued together, and one warpgroup's softmax overlaps with the other's products.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head), SIZE
// (of a head, a multiple of 64), TOKENS_PER_BLOCK (a power of two), STAGES, WARPGROUPS (2), UNIT, K_SCALE, V_SCALE,
// STATIC, IMAGES (whether images.cu has converted the tiles of the launch's heads: then one thread copies them),
// HAS_CONTEXT (whether tokens before `context_ends` have FP8 products and are left to chunk_fp8.cu; without IMAGES), ENDS
// (number of tokens computed at the end of each request; 0: all).
// Grid: at most one thread block per multiprocessor. `counter` is zero before and after.

#include "ops/paged_attention/chunk/rows.cuh"
#if IMAGES
#include "ops/paged_attention/chunk/images.cuh"
#endif

// Registers of a thread that loads and of one that computes; 504 are three times 168. Those that only copy leave room for queries.
#if IMAGES
#define REGISTERS_LOAD "24"
#define REGISTERS_COMPUTE "240"
#else
#define REGISTERS_LOAD "88"
#define REGISTERS_COMPUTE "208"
#endif

extern "C" __global__ void __launch_bounds__(THREADS * (1 + WARPGROUPS), 1)
    chunk(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
          const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
          const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
          int* counter, float softmax_scale, int table_stride, int num_requests, int min_tokens
#if HAS_CONTEXT
          , const int* context_ends
#endif
#if IMAGES
          , u8* images, int room_tiles, int first_head, int num_heads
#endif
    ) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Shared shared = {shared_address(memory), memory};
  init_barriers(shared, IMAGES ? 1 : THREADS / 32);
  __syncthreads();
  wait_for_dependencies();
  if (threadIdx.x < THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " REGISTERS_LOAD ";");
#if IMAGES
    const Step step = {position_ids, cu_q,       kv_lens,    block_tables, table_stride,
                       num_requests, min_tokens, first_head, num_heads, nullptr, 0, 0};
    Imaged source = {{images, room_tiles, num_heads}};
#else
#if !HAS_CONTEXT
    constexpr int* context_ends = nullptr;
#endif
    const Step step = {position_ids, cu_q, kv_lens, block_tables, table_stride, num_requests,
                       min_tokens,   0,    HEADS,   context_ends, 0,            0};
    Paged source;
    source.loader.cache = cache, source.loader.tables = block_tables;
#endif
    bring_items(shared, step, q, source, counter);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 " REGISTERS_COMPUTE ";");
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  Rings rings;
#pragma unroll 1
  for (u32 nth = 0;; ++nth) {
    barrier_wait(shared.full_item(nth % 2), nth / 2 % 2);
    const volatile Item& item = shared.item(nth % 2);
    const int tiles = item.tiles, full_tiles = item.full_tiles;
    if (tiles == 0) break;
    const u32 operand = shared.queries(nth % 2, threadIdx.x / 128 - 1);
#if IMAGES
    u32 queries[STEPS][4];
    load_queries(queries, operand);
#else
    const u32 queries = operand;
#endif
    int last_key[2];  // that a row sees
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = item.token + min(row_of(r), item.rows - 1) / GROUP;
      last_key[r] = min(load_int(position_ids + token), item.limit - 1);
    }
    State all, unit;
    attend<Softening>(shared, rings, queries, tiles, full_tiles, last_key, scale, all, unit);
    append(all, unit, unit.weighed());
    // Read here, because keeping them through the loop would cost registers.
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    store(all, item, out, value_scale, quanta);
    release(shared.empty_item(nth % 2));
  }
}

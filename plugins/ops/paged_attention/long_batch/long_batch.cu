// Paged attention of chains of tokens of several requests in long contexts, for numbers of rows that long.cu would have
// to pad too much.
//
// Computes the same bits as the other kernels of this folder. A thread block (one per multiprocessor) has up to ROWS
// rows (query tokens times the query heads of one KV head), and reads every tile of its share of a context once for all
// of them. Each warpgroup processes one work item (`unit`, shared/tiles.py) at a time (units.cuh); rows are the columns
// (N) of its products (products.cuh). The thread block with a context's beginning merges its work items as they are
// computed; other blocks that share the context store theirs, and when all have arrived, they merge all of it together
// (merge.cuh). That is why all blocks have to run concurrently. A context that is not shared needs no synchronization.
//
// Macros: MODEL_TYPE, KV_TYPE (bytes), OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head),
// SIZE (of a head, 128), TOKENS_PER_BLOCK (a power of two), ROWS, STREAMS (warpgroups), SLOTS (tiles of a ring),
// SHARED_BYTES, UNIT, MOST_UNIT, K_SCALE, V_SCALE, STATIC.
// Grid: splits, KV heads * blocks of rows, requests. Counters are zero before and after.

#include "ops/paged_attention/long_batch/merge.cuh"

// Queries as right operands, in the order of dimensions of load_keys; zeros for missing rows.
DEVICE void stage_queries(const Shared& shared, const MODEL_TYPE::Storage* q, const Part& part) {
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * STEPS; i += THREADS) {
    const int row = i / STEPS, step = i % STEPS;
    const long long its = (long long)(part.first_token + row / GROUP) * HEADS + part.head;
    const MODEL_TYPE::Storage* from = q + its * (GROUP * SIZE) + row % GROUP * SIZE + step * 16;
    uint4 x[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (row < part.num_rows) x[0] = __ldcg((const uint4*)from), x[1] = __ldcg((const uint4*)from + 1);
    const u32 at = shared.queries() + step / 4 * HALF_BYTES + row * 128;
    const int piece = step % 4 * 2;
    store_shared(at + ((piece ^ (row & 7)) << 4), to_inner(x[0].x), to_inner(x[0].z),
                 to_inner(x[1].x), to_inner(x[1].z));
    store_shared(at + (((piece + 1) ^ (row & 7)) << 4), to_inner(x[0].y), to_inner(x[0].w),
                 to_inner(x[1].y), to_inner(x[1].w));
  }
  shared_fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_long_batch(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
                const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
                const int* position_ids, const int* cu_q, const int* kv_lens,
                const int* block_tables, float* partial, int* counters, float softmax_scale,
                int table_stride, int block_tokens, int max_tokens, int max_entries) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Shared shared = {shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STREAMS; ++i) barrier_init(shared.turn(i), WARPGROUP);
    barrier_init_fence();
  }
  wait_for_dependencies();
  const int request = blockIdx.z, head = blockIdx.y % HEADS;
  const int first_token = blockIdx.y / HEADS * block_tokens;
  const Numbers numbers = {load_int(cu_q + request), load_int(cu_q + request + 1),
                           load_int(kv_lens + request)};
  const int count = numbers.end - numbers.start;
  const int limit = min(numbers.limit, table_stride * TOKENS_PER_BLOCK);
  if (count > max_tokens || first_token >= count || limit <= 0) return;
  const int group = blockIdx.z * gridDim.y + blockIdx.y, splits = gridDim.x, nth = blockIdx.x;
  const int tiles = (limit + KEYS - 1) / KEYS;
  Share share;
  share.divide(tiles, nth, splits);
  Part part;
  part.head = head, part.request = request, part.first_token = numbers.start + first_token;
  part.num_rows = min(block_tokens, count - first_token) * GROUP;
  part.merges = nth == 0;
  const long long entries = (long long)group * max_entries;
  part.entries.sums = (float4*)partial + entries * (ROWS * SIZE / 4);
  part.entries.states =
      (float2*)(partial + (long long)gridDim.y * gridDim.z * max_entries * (ROWS * SIZE)) +
      entries * ROWS;
  part.entries.first_unit = Share::border(tiles, 1, splits);
  const Stream its(shared, part);
  const int* table = block_tables + (long long)request * table_stride;
  TileCopier copier;
  copier.source = cache + (long long)head * (TOKENS_PER_BLOCK * SIZE) + threadIdx.x % CHUNKS * 16;
  copier.table = table, copier.stream = its.nth, copier.end = share.end, copier.limit = limit;
  copier.num_pages = (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
  copier.start(shared, share.first_unit + its.nth);
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  const int row_of_thread = min(its.row(), part.num_rows - 1);
  const int full_tiles = min(load_int(position_ids + part.first_token) + 1, limit) / KEYS;
  const int last_key =
      min(load_int(position_ids + part.first_token + row_of_thread / GROUP), limit - 1);
  stage_queries(shared, q, part);
  __syncthreads();
  {
    Sums sums;
    RowState row;
    attend_share(its, share, copier, full_tiles, last_key, scale, sums, row);
  }
  // Read here, because keeping them through the loop would cost registers.
  const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
  const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
  const Output output = {out, value_scale, quanta};
  __syncthreads();
  if (splits == 1) {
    write_merged(shared, part, output);
    return;
  }
  if (nth == 0) store_merged(shared, part, share.end == 0);
  int* counter = counters + group * 32;  // one cache line each
  meet_shares(counter, splits);
  merge_entries(part, count_units(tiles) - part.entries.first_unit + 1, nth, splits, output);
  if (threadIdx.x == 0) leave_others(counter, splits);
}

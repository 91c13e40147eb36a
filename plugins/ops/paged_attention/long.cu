// Paged attention of several tokens of a request, chains and trees, against a long context.
//
// Computes the same bits as the other kernels of this folder. A context is shared by `splits` thread blocks, one to a
// multiprocessor, each with some of its work items (`unit`, tiles.py) for up to 128 rows, query tokens times the query
// heads of one KV head. Keys and values are read and converted once for all of them: four warps bring tiles
// (long_tiles.cuh), two warpgroups compute (long_units.cuh). They compute 64 rows each or, where there are no more rows,
// every other work item. All work items are stored; when all thread blocks of a context have arrived, they merge them
// together (long_merge.cuh), which is why all run at once.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads for each), SIZE (of
// a head, a multiple of 64), TOKENS_PER_BLOCK (a power of two), TREE (whether requests may have trees: long_tail.cuh),
// WINDOW_TILES, SHARED_BYTES, UNIT, MOST_UNIT, K_SCALE, V_SCALE, STATIC; WARPGROUPS (2) and STAGES are of chunk_load.cuh.
// Grid: splits, KV heads * blocks of rows, requests. Counters are zero before and after.

#if TREE
#include "ops/paged_attention/long_tail.cuh"
#else
#include "ops/paged_attention/long_merge.cuh"
static_assert(Tiles::FACTORS_AT + MERGE_BYTES <= SHARED_BYTES, "room for all of it");
#endif

constexpr int TAIL_TILES = 3;  // of a context take as long as the keys from a tree's root's tile on

DEVICE void meet_all() { asm volatile("barrier.sync 3, 384;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    attend_long(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
                const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
                const int* position_ids, const int* cu_q, const int* kv_lens,
                const int* block_tables, float* partial, int* counters, float softmax_scale,
                int table_stride, int block_tokens, int max_tokens, int streams, int max_units
#if TREE
                , int num_pages, int num_tokens, const int* tree_start, const int* tree_root,
                const int* paths, int path_stride
#endif
    ) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Tiles shared = {shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(shared.full_keys(i), THREADS / 32);
      barrier_init(shared.full_values(i), THREADS / 32);
      barrier_init(shared.empty_keys(i), streams == 2 ? 4 : 8);
      barrier_init(shared.empty_values(i), streams == 2 ? 4 : 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_dependencies();
  const int request = blockIdx.z, head = blockIdx.y % HEADS;
  const int first_token = blockIdx.y / HEADS * block_tokens;
#if TREE
  const columns::StepTrees trees = {tree_start, tree_root, paths, path_stride};
  const Numbers numbers = trees.load_numbers(cu_q, kv_lens, request);
#else
  const Numbers numbers = {load_int(cu_q + request), load_int(cu_q + request + 1),
                           load_int(kv_lens + request)};
#endif
  const int count = numbers.end - numbers.start;
  const int limit = min(numbers.limit, table_stride * TOKENS_PER_BLOCK);
  if (count > max_tokens || first_token >= count || limit <= 0) return;
  const int group = blockIdx.z * gridDim.y + blockIdx.y, splits = gridDim.x;
  Rows rows;
  rows.head = head, rows.request = request, rows.first_token = numbers.start + first_token;
  rows.num_rows = min(block_tokens, count - first_token) * GROUP;
  rows.units.rows = block_tokens * GROUP;
  const long long unit_rows = (long long)max_units * rows.units.rows;
  rows.units.sums = partial + group * unit_rows * SIZE;
  const long long num_groups = (long long)gridDim.y * gridDim.z;
  rows.units.states = (float2*)(partial + num_groups * unit_rows * SIZE) + group * unit_rows;
  const int all_tiles = (limit + KEYS - 1) / KEYS;
#if TREE
  const int tiles = min(columns::TreePaths::first_tile(numbers), all_tiles);
  const int end = min(all_tiles, tiles + WINDOW_TILES);
#else
  const int tiles = all_tiles, end = all_tiles;
#endif
  Share share;
  share.divide(tiles, TREE ? TAIL_TILES : 0, blockIdx.x, splits);
  share.streams = streams;
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
#if TREE
  const Tail tail(memory, numbers);
  const bool has_tail = int(blockIdx.x) == splits - 1;
#endif
  if (threadIdx.x < THREADS) {  // of 504 registers for three threads: 104, 200, 200
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    Loader loader[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      loader[p].cache = cache, loader[p].tables = block_tables;
      loader[p].aim(head, request * table_stride);
    }
    bring_tiles(shared, loader, share, limit, pages_of(limit));
#if TREE
    if (!has_tail) return;
    meet_all();
    attend_tail(tail, rows, (COMPUTING + threadIdx.x) / 32, end, scale);
    meet_all();
#endif
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
#if TREE
  if (has_tail) {
    const int* table = block_tables + (long long)request * table_stride;
    const Sources from = {q, cache, position_ids, trees, table, table_stride, num_pages, num_tokens};
    bring_tail(tail, rows, from, first_token);
  }
#endif
  {
    u32 queries[STEPS][4];
    load_queries(queries, q, rows, streams);
    int last_key[2] = {0, 0}, full_tiles = tiles;
    if (!TREE) {
      full_tiles = min(load_int(position_ids + rows.first_token) + 1, limit) / KEYS;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(rows.own(r, streams), rows.num_rows - 1);
        last_key[r] = min(load_int(position_ids + rows.first_token + row / GROUP), limit - 1);
      }
    }
    attend_share(shared, share, rows, queries, full_tiles, last_key, scale);
  }
#if TREE
  if (has_tail) {
    meet_all();
    attend_tail(tail, rows, (threadIdx.x - THREADS) / 32, end, scale);
    meet_all();
  }
#endif
  int* counter = counters + group * 32;  // one cache line each
  meet_shares(counter, splits);
  // Read here, because keeping them through the loop would cost registers.
  const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
  const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
  merge_units(shared, memory, rows, count_units(end), blockIdx.x, splits, out, value_scale, quanta);
  leave_shares(counter, splits);
}

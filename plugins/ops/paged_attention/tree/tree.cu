// Paged attention of trees of tokens, or of chains in the same step, where few multiprocessors are needed.
//
// Computes the same bits as the other kernels of this folder. A thread block has 64 rows (query tokens times the query
// heads of one KV head). The tiles before the root's tile are processed one after another, as in chunk.cu, by four
// producer warps and four compute warps; concurrently eight warps process the keys from the root's tile on, 8 rows each
// (paths.cuh). Those keys are the last work items, up to WINDOW_TILES tiles: their sums pass through shared memory, and
// the compute warps merge and store them. If the root's work item begins before the root's tile, the compute warps pass
// its state to the eight warps, which continue it.
//
// The step's integers and the tiles before the root's tile were written before the kernel that writes the step's keys,
// and that kernel lets this one start only when everything before it has ended (WRITES_CACHE in epilogue.cuh). So only
// warps that read queries or the step's own keys wait.
//
// A tile takes about 1 us, because its products, its softmax and its merge are serial. If enough multiprocessors are
// free, two thread blocks process the same rows (PARTS), each with half of the value dimensions: both compute all
// softmax weights, and each merges and stores its own dimensions, so that neither waits for the other. verification.cu
// is faster as long as all its thread blocks (of up to 24 rows) run concurrently; this kernel is for steps of more rows.
//
// Macros: as of chunk.cu, with WARPGROUPS 1; TREE (1), WINDOW_TILES, PARTS (1, or 2 with SIZE 128), SHARED_BYTES.
// Grid: 1, KV heads * blocks of rows * PARTS, requests.

#include "ops/paged_attention/tree/load.cuh"

// The last of the keys that a part's tokens see, for every thread.
DEVICE int last_seen(const Part& part, const int* position_ids, int num_tokens) {
  const int first = part.paths.numbers.start + part.first_token;
  const int end = min(min(first + TOKENS, part.paths.numbers.end), num_tokens);
  int position = -1;
  for (int at = first + lane_id(); at < end; at += 32) {
    position = max(position, load_int(position_ids + at));
  }
  return min(__reduce_max_sync(~0u, position), part.paths.numbers.limit - 1);
}

// The merged state of all keys.
DEVICE void attend_all(const Shared& shared, const TailShared& tail, const Part& part,
                       const Sources& from, float scale, State& all) {
  State unit;
  all.clear();
  wait_for_dependencies();
  if (part.tiles > 0) {
    bring_queries<8>(shared, part.item(), from.q, 0, thread_from_here() - THREADS);
    shared_fence();
    tell(shared.full_item(0));
    barrier_wait(shared.full_item(0), 0);
    Rings rings;
    attend<Softening>(shared, rings, shared.queries(0, 0), part.tiles, part.tiles, {}, scale, all, unit);
    if (part.goes_on()) {
      store_rows(tail.handed, unit);
      arrive<UNIT_STOPPED>();
    } else {
      append(all, unit, unit.weighed());
    }
  }
  int number = part.paths.root_unit();
#pragma unroll 1
  while (true) {
    meet<UNIT_DONE>();
    load_rows(unit, tail.handed);
    append(all, unit, unit.weighed());
    if (!part.has_unit(++number)) return;
    arrive<UNIT_MERGED>();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128 + TAIL_THREADS, 1)
    tree(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
         const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
         const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
         float softmax_scale, int table_stride, int max_tokens, int num_pages, int num_tokens,
         const int* tree_start, const int* tree_root, const int* paths, int path_stride) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Shared shared = {shared_address(memory), memory};
  const TailShared tail(memory);
  init_barriers(shared, THREADS / 32);
  __syncthreads();
  Part part;
  const int nth_rows = blockIdx.y / PARTS;
  part.nth = blockIdx.y % PARTS;
  part.request = blockIdx.z, part.head = nth_rows % HEADS;
  part.first_token = nth_rows / HEADS * TOKENS;
  const bool loads = threadIdx.x < THREADS;
  Loader loader;
  loader.cache = cache, loader.tables = block_tables;
  Pages pages;
  if (loads) {  // the first tiles' pages together with the step's numbers
    loader.aim(part.head, part.request * table_stride);
    pages.table = block_tables + (long long)part.request * table_stride, pages.count = table_stride;
    pages.start(0);
  }
  const columns::StepTrees trees = {tree_start, tree_root, paths, path_stride};
  part.paths.start(trees.load_numbers(cu_q, kv_lens, part.request));
  const Numbers& numbers = part.paths.numbers;
  const int count = numbers.end - numbers.start;
  if (count > max_tokens || part.first_token >= count || numbers.limit <= 0) {
    wait_for_dependencies();  // who waits for this kernel waits for those before it, too
    return;
  }
  part.tiles = min(columns::TreePaths::first_tile(numbers), table_stride * TOKENS_PER_BLOCK / KEYS);
  part.all_tiles = part.tiles;
  if (!loads) {
    part.all_tiles = max(last_seen(part, position_ids, num_tokens) / KEYS, part.tiles) + 1;
    part.all_tiles = min(part.all_tiles, part.tiles + WINDOW_TILES);
  }
  const Sources from = {q,     cache,        position_ids, block_tables, trees,
                        table_stride, num_pages, num_tokens, v_scale, out_scale};
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  if (loads) {  // of 512 registers for four threads: 72, 200, 120, 120, or with half of the sums 72, 168, 128, 128
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    load_tiles(shared, part, loader, pages);
  } else if (threadIdx.x < THREADS + 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PARTS == 1 ? 200 : 168));
    State all;
    attend_all(shared, tail, part, from, scale, all);
    const float2 scales = tail.scales;
    store(all, part.item(), out + part.nth * OWN_SIZE, scales.x, scales.y);
  } else {
    if (PARTS == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    attend_tail(tail, shared.queries(1, 0), part, from, scale);
  }
}

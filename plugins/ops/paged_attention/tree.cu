// Paged attention of trees of tokens, or of chains beside them, on few multiprocessors.
//
// Computes the same bits as the other kernels of this folder. A thread block has 64 rows, query tokens times the
// query heads of one KV head. Tiles before the root's are processed as in chunk.cu, one after another, by four
// warps that load and four that compute; at the same time eight warps process the keys from the root's tile on,
// each for 8 rows (tree_paths.cuh). These are the last work items, up to WINDOW_TILES: their sums pass through
// shared memory, and the computing warps merge and store. Where the root's work item begins before the root's tile, the
// computing warps hand it to the others, which go on.
//
// A tile takes about 1.1 us, because its products, its softmax and its merge follow each other. So two thread blocks, a
// cluster, share the tiles before the root's where there are multiprocessors for them (tree_shares.cuh). Verification.cu
// is faster while its thread blocks, of up to 24 rows, run at once; this kernel is for steps of more rows.
//
// Macros: as of chunk.cu, with WARPGROUPS 1; TREE (1), WINDOW_TILES, SPLITS (1 | 2), SHARED_BYTES.
// Grid: SPLITS, KV heads * blocks of rows, requests.

#include "ops/paged_attention/tree_tail.cuh"

// Brings the part's keys and values before the root's tile.
DEVICE void load_tiles(const Shared& shared, const Part& part, const Sources& from) {
  if (part.tiles == 0) return;
  Loader loader;
  loader.cache = from.cache, loader.tables = from.block_tables;
  loader.aim(part.head, part.request * from.table_stride);
  const OwnTiles own = part.own_tiles();
  const int pages = pages_of(part.tiles * KEYS);
  loader.load_pages(own.tile, pages);
  bring_tiles(shared, loader, own, pages);
}

// The merged state of all keys, of the dimensions that the block merges.
DEVICE Merged attend_all(const Shared& shared, const TailShared& tail, const Part& part,
                         const MODEL_TYPE::Storage* q, float scale) {
  State unit;
  Merging merging(tail.slots, tail.sending, tail.sent, part.rank(), part.root_unit());
  bool begins = part.goes_on(), waits = SPLITS > 1 && begins;
  const auto take = [&](const float (&acc)[SIZE / 2], const float (&largest)[2],
                        const float (&total)[2]) {
    if (begins) {
      store_rows(tail.begun, part.rank(), acc, largest, total);
      tell(tail.has_begun);
      begins = false;
      return;
    }
    if (waits) barrier_wait(tail.is_taken, 0);
    waits = false;
    merging.take(acc, largest, total);
  };
  const OwnTiles own = part.own_tiles();
  if (!own.is_over()) {
    bring_item(shared, part.item(), q, 0, THREADS);  // the loading warps begin with tiles
    barrier_wait(shared.full_item(0), 0);
    Rings rings;
    attend(shared, rings, shared.queries(0, 0), own, part.tiles, {}, scale, unit, take);
    take(unit.acc, unit.largest, unit.total);
  }
  merging.finish();
  Turn handed{tail.is_handed};
  int number = part.root_unit();
#pragma unroll 1
  while (true) {
    handed.wait();
    if (threadIdx.x == THREADS) tail.expect_rows();
    Merged its;
    load_rows(its, tail.handed);
    merge(merging.all, its.acc, its.largest, its.total);
    if (!part.has_unit(++number)) return merging.all;
    tell_all(tail.is_free);
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
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full_keys(i), THREADS / 32);
      barrier_init(shared.full_values(i), THREADS / 32);
      barrier_init(shared.empty_keys(i), 4);
      barrier_init(shared.empty_values(i), 4);
    }
    barrier_init(shared.full_item(0), THREADS / 32);
    barrier_init(shared.empty_item(0), 4);
    tail.begin();
    barrier_init_fence();
  }
  __syncthreads();
  if (SPLITS > 1) cluster_arrive();
  wait_for_dependencies();
  if (SPLITS > 1) cluster_wait();
  Part part;
  part.request = blockIdx.z, part.head = blockIdx.y % HEADS;
  part.first_token = blockIdx.y / HEADS * TOKENS;
  const columns::StepTrees trees = {tree_start, tree_root, paths, path_stride};
  part.paths.start(trees.load_numbers(cu_q, kv_lens, part.request));
  const Numbers& numbers = part.paths.numbers;
  const int count = numbers.end - numbers.start;
  if (count > max_tokens || part.first_token >= count || numbers.limit <= 0) return;
  part.tiles = min(columns::TreePaths::first_tile(numbers), table_stride * TOKENS_PER_BLOCK / KEYS);
  const Sources from = {q,     cache,        position_ids, block_tables,
                        trees, table_stride, num_pages,    num_tokens};
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  if (threadIdx.x < THREADS) {  // of 512 registers for four threads: 88, 208, 104, 104
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    load_tiles(shared, part, from);
  } else if (threadIdx.x < THREADS + 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    part.see(position_ids, num_tokens);
    const Merged all = attend_all(shared, tail, part, q, scale);
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    store(all, part.item(), out, value_scale, quanta, part.rank() * (SIZE / SPLITS));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    part.see(position_ids, num_tokens);
    attend_tail(tail, shared.queries(1, 0), part, from, scale);
  }
}

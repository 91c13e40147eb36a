// Paged attention of few tokens, as in a verification. A thread block processes up to ROWS rows of a request.
//
// Computes the same bits as the Triton kernels (triton/state.py says how), with the products of batch.cu. A cluster of
// SPLITS thread blocks processes ROWS query rows of one request and KV head. Each block processes UNITS work items
// (`unit`: a range of tiles, shared/tiles.py) concurrently, one per warp. It then merges them from left to right, each
// thread a few dimensions of a row, and passes the merged state to the block with the next work items; the last block
// stores the result. So only one state passes between two blocks.
//
// Before the kernel waits for its predecessor, it reads the step's parameters, which may still be those of the previous
// step, and copies the tiles that contain only tokens of earlier steps. These tiles are complete: a kernel that writes
// the cache lets later kernels start only after its own wait (WRITES_CACHE in epilogue.cuh). After the wait the
// parameters are compared with the actual ones; if they differ, everything is loaded again.
//
// Of two blocks the first may have fewer work items than the second (`first_share`), which waits for its result.
//
// With more than eight work items per block, a work item's second tile is copied without waiting for its first, into the
// slot of the work item SPARE places further, if that one does not exist and its slot is free.
//
// With EARLY, the next kernel may start before anything is copied: its first blocks then load data that other blocks
// need, too.
//
// With TREE, requests may have trees of tokens: trees.cuh.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head), SIZE
// (64 | 128), TOKENS_PER_BLOCK (a power of two, at least 8), ROWS (8 | 16 | 24), UNITS, TREE, EARLY, SPARE_WARPS,
// SPLITS, SHARED_BYTES, UNIT (tiles of the first work items), K_SCALE, V_SCALE, STATIC.
// Grid: SPLITS, KV heads * blocks of rows, requests.

#include "ops/paged_attention/verification/trees.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    verification(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
                 const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
                 const int* position_ids, const int* cu_q, const int* kv_lens,
                 const int* block_tables, float softmax_scale, int table_stride, int block_tokens,
                 int max_tokens, int num_pages, int num_tokens
#if TREE
                 , const int* tree_start, const int* tree_root, const int* paths, int path_stride
#endif
                 ) {
#if TREE
  const StepTrees trees = {tree_start, tree_root, paths, path_stride};
#else
  const StepTrees trees = {};
#endif
  if (EARLY) launch_dependents();
  extern __shared__ __align__(1024) u8 memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    barrier_init(shared.barrier, 1);
    barrier_init_fence();
    barrier_expect(shared.barrier, MESSAGE_BYTES);
  }
  __syncwarp();
  cluster_arrive();
  const int rank = blockIdx.x, request = blockIdx.z, lane = lane_id(), warp = threadIdx.x / 32;
  const int head = blockIdx.y % HEADS, first_token = blockIdx.y / HEADS * block_tokens;
  const int* table = block_tables + (long long)request * table_stride;
  const u32 keys = shared.tiles + warp * (2 * TILE_BYTES);
  Gathered& gathered = *shared.gathered;

  Numbers numbers = {0, 0, 0};
  TileCopier copier(cache, head, table);
  const int even_unit = rank * UNITS + warp, even_tile = unit_start(even_unit);  // with equal shares
  int first_tile;
  const bool is_unit = !TREE || warp < UNITS, is_tail = TREE && !is_unit && warp < UNITS + TAILS;
  Tail tail;
  bool has_second = false;  // its work item has a second tile, and a slot is unused
  const auto is_old = [&](int tile) {  // all its tokens are of earlier steps
    return (tile + 1) * KEYS <= numbers.limit - (numbers.end - numbers.start);
  };
  const auto bring = [&](bool old) {  // loads the first tiles that are old, or those that are not
    if (is_old(first_tile) == old) copier.bring(keys, first_tile, gathered.pages, rank);
    if (has_second && is_old(first_tile + 1) == old) {
      copier.bring(keys + SPARE * (2 * TILE_BYTES), first_tile + 1, gathered.pages, rank);
    }
  };
  First first;
  const auto gather = [&] {
    if (warp == 0) {
      first.read(cu_q, kv_lens, trees, request, table, rank, table_stride);
      first.give(gathered, num_pages);
    }
    __syncthreads();
    numbers = gathered.numbers;
    const int last = min(numbers.limit, table_stride * TOKENS_PER_BLOCK);
    copier.limit = TREE ? min(Tail::first_tile(numbers) * KEYS, last) : last;
    const int end = (last + KEYS - 1) / KEYS, share = first_share(end);
    first_tile = share == UNITS ? even_tile : rank * share + warp;
    has_second = even_unit >= 16 && warp + SPARE < UNITS &&
                 (even_tile + 1) * KEYS < copier.limit &&
                 unit_start(even_unit + SPARE) >= end;
    if (is_unit) bring(true);
  };
  gather();
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  if (threadIdx.x == 0) {
    gathered.value_scale = V_SCALE ? *v_scale : 1.0f;
    gathered.quanta = STATIC ? __fdiv_rn(1.0f, *out_scale) : 1.0f;
  }
  if (!EARLY) launch_dependents();
  wait_for_dependencies();
  int num_rows;
  while (true) {
    num_rows = min(block_tokens, numbers.end - numbers.start - first_token) * GROUP;
    const int from = numbers.start + first_token;  // token
    First now;
    int position = 0;  // of the lane's row
    if (warp == 0) {   // requested together with the queries, and used after them
      now.read(cu_q, kv_lens, trees, request, table, rank, table_stride);
      const int token = from + lane / GROUP;
      if (lane < num_rows && u32(token) < u32(num_tokens)) position = load_int(position_ids + token);
    }
    if (is_unit) bring(false);
#if TREE
    if (is_tail) {
      tail.begin(numbers, table, table_stride, position_ids, first_token, num_tokens);
    }
#endif
    stage_queries(shared.queries, q, from, head, num_rows, num_tokens);
    if (warp == 0 && lane < ROWS) {
      const int last = (TREE ? numbers.limit : copier.limit) - 1;
      gathered.seen[lane] = lane < num_rows ? min(position, last) : TREE ? -1 : last;
    }
    if (!__syncthreads_or(warp == 0 && now.differs(first))) break;
    wait_for_copies<0>();
    gather();
  }
  cluster_wait();  // every thread block of the cluster has initialised its barrier
  const int count = numbers.end - numbers.start, limit = copier.limit;
  if (count > max_tokens || first_token >= count || (TREE ? numbers.limit : limit) <= 0) {
    wait_for_copies<0>();
    return;
  }

  const int all_see = __reduce_min_sync(~0u, gathered.seen[lane % ROWS]);
  const int tiles = (limit + KEYS - 1) / KEYS;  // of a tree: before the root's
  const int all_tiles = TREE ? __reduce_max_sync(~0u, gathered.seen[lane % ROWS]) / KEYS + 1 : tiles;
  const int units = count_units(all_tiles);
#if TREE
  if (is_tail) {
    if (tail.is_hosted(rank)) {
      tail.bring(shared, cache, head, table_stride, num_pages, trees, first_token);
    }
    wait_for_copies<0>();
    tail.meet();
  }
#endif
  if (TREE) gathered.tiles = tiles, gathered.all_tiles = all_tiles;  // the same in all threads
  // Of trees everything is found again where it is used: kept through products it would be stored in local memory,
  // which costs more than it looks, because L2 writes it back while weights pass through.
  const auto known_tiles = [&] { return TREE ? reload(gathered.tiles) : tiles; };
  const auto known_units = [&] { return TREE ? count_units(reload(gathered.all_tiles)) : units; };
  const auto own_warp = [&] { return TREE ? thread_from_here() / 32 : warp; };
  const auto own_slot = [&] { return TREE ? shared.tiles + own_warp() * (2 * TILE_BYTES) : keys; };
  const auto known_copier = [&] {
    if (!TREE) return copier;
    TileCopier its(cache, head, table, thread_from_here() % 32);
    its.limit = min(reload(gathered.tiles) * KEYS, table_stride * TOKENS_PER_BLOCK);
#pragma unroll
    for (int i = 0; i < TILE_PAGES; ++i) its.pages[i] = copier.pages[i];
    return its;
  };
  const auto first_of = [&](int unit) {  // tile, or the end where there is no such work item
    return unit < known_units() ? unit_start(unit) : known_tiles();
  };
  const auto ends_with = [&](int unit, int tile) {
    return tile + 1 >= min(unit_start(unit + 1), known_tiles());
  };
  const auto load_pages = [&](int tile) {
    TileCopier its = known_copier();
    if (tile < known_tiles() && !has_second) its.load_pages(tile);
#pragma unroll
    for (int i = 0; i < TILE_PAGES; ++i) copier.pages[i] = its.pages[i];
  };
  const int share = first_share(tiles), most = rank == 0 ? share : UNITS;  // work items of the first block, of this one
#pragma unroll 1
  for (int round = 0; round * SPLITS * UNITS + rank * share < known_units(); ++round) {
    const int start = round * SPLITS * UNITS + rank * share;
    const auto own_unit = [&] { return start + own_warp(); };
    const auto next_first = [&] { return first_of(own_unit() + SPLITS * UNITS); };
    if (is_tail) Tail::finish(shared, start, known_units(), reload(gathered.all_tiles), scale);
    const bool is_busy = TREE ? is_unit && first_of(own_unit()) < known_tiles() : own_unit() < min(units, start + most);
    FirstColumns some;
    OtherColumns others;
    if (HAS_OTHERS && is_busy && ends_with(own_unit(), first_of(own_unit()))) {
      // Of one tile: some columns are stored where its keys were.
      const int tile = first_of(own_unit());
      wait_for_copies<1>();
      __syncwarp();
      some.weigh(shared, own_slot(), scale, tile, true, all_see, [] {});
      others.weigh(shared, own_slot(), scale, tile, true, all_see, [] {});
      wait_for_copies<0>();
      __syncwarp();
      some.add_values(own_slot());
      some.store(shared);
      others.add_values(own_slot());
      __syncwarp();
      others.store(shared);
      load_pages(next_first());
    } else if (is_busy) {
      int tile = first_of(own_unit());
      bool goes_on;
      const auto release = [&] {  // the tile's keys have been read: those of the next may arrive
        __syncwarp();
        load_pages(goes_on ? tile + 1 : next_first());
        if (goes_on && !has_second) {
          known_copier().copy(own_slot(), tile + 1, 0);
        } else {
          commit_copies();  // the same number of groups as if a tile followed
        }
      };
      const auto add_tile = [&](bool is_first) {  // of the work item
        goes_on = !ends_with(own_unit(), tile);
        const u32 at = own_slot() + (has_second && !is_first ? SPARE * (2 * TILE_BYTES) : 0);
        if (has_second) wait_for_copies<0>();
        else wait_for_copies<1>();
        __syncwarp();
        some.weigh(shared, at, scale, tile, is_first, all_see, release);
        if (HAS_OTHERS) others.weigh(shared, at, scale, tile, is_first, all_see, release);
        wait_for_copies<1>();
        __syncwarp();
        some.add_values(at);
        if (HAS_OTHERS) others.add_values(at);
        __syncwarp();
        if (goes_on && !has_second) known_copier().copy(own_slot() + TILE_BYTES, tile + 1, 1);
        ++tile;
      };
      if (TREE) {  // few registers are left: the first tile by code of its own, before there are sums
        add_tile(true);
#pragma unroll 1
        while (goes_on) add_tile(false);
      } else {
        some.state.clear();
        bool is_first = true;
#pragma unroll 1
        do {
          add_tile(is_first);
          is_first = false;
        } while (goes_on);
      }
      some.store(shared);
      if (HAS_OTHERS) others.store(shared);
    }
    if (TREE && is_busy && own_unit() == count_units(known_tiles() + 1) - 1) Tail::stopped();
    __syncthreads();
    const int units_now = known_units();
    const bool has_before = start > 0, is_last = start + most >= units_now;
    const u32 parity = (rank > 0 ? round : round - 1) & 1;
    if (own_warp() < MERGERS) {
      Merged merged;
      merged.append(shared, min(units_now - start, most), has_before, parity);
      if (is_last) {
        const Numbers its = gathered.numbers;
        const long long at = (its.start + first_token) * HEADS + head;
        const int rows = min(block_tokens, its.end - its.start - first_token) * GROUP;
        merged.store({out, gathered.value_scale, gathered.quanta}, rows, at);
      } else {
        merged.send(shared, rank + 1 == SPLITS ? 0 : rank + 1);
      }
    }
    if (start + SPLITS * UNITS < units_now) {  // the block's next work items: their tiles overwrite the parts
      __syncthreads();
      if (is_unit) {
        const TileCopier its = known_copier();
        const int tile = next_first();
        its.copy(own_slot(), tile, 0);
        its.copy(own_slot() + TILE_BYTES, tile, 1);
      }
    }
  }
  wait_for_copies<0>();
}

// Paged attention of several tokens per request, chains and trees, in long contexts.
//
// Computes the same bits as the other kernels of this folder. A thread block has up to 64 * WARPGROUPS rows (query
// tokens times the query heads of one KV head), and reads every tile of its share of a context once for all of them:
// four producer warps load tiles (tiles.cuh), each compute warpgroup processes 64 rows (units.cuh). The thread block
// with a context's beginning merges its work items as they are computed; other blocks that share the context store
// theirs, and when all have arrived, they merge all of it together (merge.cuh). That is why all blocks have to run
// concurrently: one per multiprocessor, or two with 64 rows. The binary for many requests divides all tiles of the step
// into equal ranges (ranges.cuh), which need no such synchronization and leave registers for some of the queries; longer
// contexts are shared by thread blocks instead.
//
// Macros: MODEL_TYPE, KV_TYPE (bytes), OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head),
// SIZE (of a head, 128), TOKENS_PER_BLOCK (a power of two), WARPGROUPS (1 or 2), STAGES (tiles as operands), BYTE_SLOTS
// (tiles as stored in the cache), ALONE (for many requests), TREE (whether requests may have trees: tail.cuh),
// TAIL_TILES (number of context tiles that take as long as the keys from a tree's root's tile on), WINDOW_TILES,
// LEAST_HELPED, SHARED_BYTES, UNIT, MOST_UNIT, K_SCALE, V_SCALE, STATIC.
// Grid, one of: thread blocks that share all contexts of a KV head and a block of rows (shares.cuh), KV heads * blocks of
// rows; or 1, KV heads * blocks of rows, requests; or ranges; or, for one request, all thread blocks that share its
// contexts of all KV heads, followed by those that help two of these each (help.cuh). Counters are zero before and after.

#include "ops/paged_attention/long/help.cuh"
#if TREE
#include "ops/paged_attention/long/tail.cuh"
#endif
#if ALONE
#include "ops/paged_attention/long/attend_range.cuh"
#endif

// Registers of a thread that brings and of one that computes: 256 are two times 128, 504 three times 168.
#if WARPGROUPS == 1
#define REGISTERS_BRING "40"
#define REGISTERS_COMPUTE "216"
#else
#define REGISTERS_BRING "56"
#define REGISTERS_COMPUTE "224"
#endif

extern "C" __global__ void __launch_bounds__(ALL_THREADS, WARPGROUPS == 1 ? 2 : 1)
    attend_long(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
                const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
                const int* position_ids, const int* cu_q, const int* kv_lens,
                const int* block_tables, float* partial, int* counters, float softmax_scale,
                int table_stride, int block_tokens, int max_tokens, int max_entries, int num_requests
#if TREE
                , int num_pages, int num_tokens, const int* tree_start, const int* tree_root,
                const int* paths, int path_stride
#endif
    ) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Tiles shared = {shared_address(memory)};
  if (threadIdx.x == 0) shared.init_barriers();
#if TREE
  const columns::StepTrees trees = {tree_start, tree_root, paths, path_stride};
  const Requests requests = {cu_q, kv_lens, table_stride, block_tokens, max_tokens, num_requests, trees};
#else
  const Requests requests = {cu_q, kv_lens, table_stride, block_tokens, max_tokens, num_requests};
#endif
  Place& placed = *(Place*)(memory + PLACE_AT);
#if ALONE
  Range& range = *(Range*)(memory + RANGE_AT);
  if (threadIdx.x / 32 == 1) find_range(range, placed, requests, max_entries);
  __syncthreads();
  if (range.begin == range.end) return;
  if (threadIdx.x < THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " REGISTERS_BRING ";");
    bring_range(shared, memory, requests, cache, block_tables);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 " REGISTERS_COMPUTE ";");
  wait_for_dependencies();
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  Part part;
  State all;
  const bool shares = attend_range(shared, memory, requests, q, v_scale, out_scale, out, position_ids, partial,
                                   max_entries, counters, scale, part, all);
  if (!shares) return;
#else
  if (threadIdx.x / 32 == 1) find_place(placed, requests, max_entries);
  __syncthreads();
  if (placed.count == 0) return;
  const Numbers numbers = placed.context.numbers;
  const int head = placed.rows % HEADS, first_token = placed.rows / HEADS * block_tokens;
  const int request = placed.request, limit = placed.context.limit, tiles = placed.context.tiles;
  const int count = numbers.end - numbers.start;
  const Share share = placed.share;
  if (threadIdx.x < THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " REGISTERS_BRING ";");
    const int own_tiles = max(min(numbers.limit - count, limit), 0) / KEYS;
    Bringer bringer(shared);
    const int heads = HELPS && placed.nth < 0 ? 2 : 1;
#pragma unroll 1
    for (int nth = 0; nth < heads; ++nth) {
      bringer.aim(cache, head + nth, block_tables + (long long)request * table_stride, limit);
      bringer.bring(share, limit, TREE ? tiles : own_tiles);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 " REGISTERS_COMPUTE ";");
  wait_for_dependencies();
#if !TREE
  if (HELPS && placed.nth < 0) {
    const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
    help(shared, placed, q, position_ids, partial, counters, scale, block_tokens, max_entries);
    return;
  }
#endif
  Part part;
  part.head = head, part.token = numbers.start + first_token;
  part.rows = min(block_tokens, count - first_token) * GROUP;
  part.merges = placed.nth == 0;
  const int entry_rows = block_tokens * GROUP;
  const long long entry = placed.first_entry;
  part.entries.rows = entry_rows, part.entries.first_unit = placed.first_unit;
  part.entries.sums = partial + entry * entry_rows * SIZE;
  part.entries.states =
      (float2*)(partial + (long long)num_blocks_of_rows() * max_entries * entry_rows * SIZE) + entry * entry_rows;
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  State all;
  {
    const int warpgroup = WARPGROUPS > 1 && __any_sync(~0u, threadIdx.x >= 2 * THREADS);  // as the compiler sees
    Seen seen = {share.end, tiles, {0, 0}};
    if (!TREE) seen.full_tiles = part.load_positions(position_ids, limit, seen.last_key);
    stage_queries(shared.queries(warpgroup), q, part);
    meet_computing();
    const Queries queries(shared.queries(warpgroup));
    State unit;
    u32 parity = 0;
    all.clear();
    const auto finish = [&](int nth, State& to, const State& its, const State::Weighed& weighed) {
      finish_unit(part, nth, to, its, weighed);
    };
#if TREE
    const Tail tail(memory, numbers);
    const bool has_tail = placed.nth == placed.count - 1;
    // The root's work item, if it begins before the root's tile.
    const int root_unit = tail.paths.root_unit();
    const int held = has_tail && unit_start(root_unit) < tiles ? root_unit : -1;
    unit.clear_states();
    const bool is_held = share.begin < share.end && attend_share(shared, share.first_unit, seen, part.rows, queries, scale, held,
                                                                 parity, all, unit, finish);
    if (has_tail) {
      const int* table = block_tables + (long long)request * table_stride;
      const Sources from = {q, cache, position_ids, trees, table, table_stride, num_pages, num_tokens};
      attend_tail(tail, part, is_held, all, unit, from, first_token, placed.context.end, scale);
    }
#else
    unit.clear_states();
    if (share.begin < share.end) {
      attend_share(shared, share.first_unit, seen, part.rows, queries, scale, -1, parity, all, unit, finish);
    }
#endif
  }
#endif
  const volatile Place& place = placed;  // read again, because keeping it through the loop would cost registers
  const int sharing = place.count;
  if (part.merges && sharing > 1) store_entry(part, 0, all, all.weighed());
  if (sharing == 1) {
    const float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
    const float quanta = STATIC ? __fdiv_rn(1.0f, *(const volatile float*)out_scale) : 1.0f;
    write_merged(all, part, out, value_scale, quanta);
    return;
  }
  int* counter = counters + place.counter;
  // Asked for here, because keeping them through the loop would cost registers; used behind the meeting, as they take long.
  float value_scale = V_SCALE ? *(const volatile float*)v_scale : 1.0f;
  float its_scale = STATIC ? *(const volatile float*)out_scale : 1.0f;
  meet_shares(counter, sharing);
  const int left = leave_shares(counter);
  asm volatile("" : "+f"(value_scale), "+f"(its_scale));
  const float quanta = STATIC ? __fdiv_rn(1.0f, its_scale) : 1.0f;
  merge_entries(shared, memory, part, part.entries.of(count_units(place.context.end)), place.nth, place.mergers, out,
                value_scale, quanta);
  clear_shares(counter, left, sharing, place.mergers);
}

// Paged attention with FP8 products for requests with few tokens: generation, verification of chains, ends of prompts.
// A row has the same bits as in chunk_fp8.cu, which computes requests with many tokens (chunk_fp8/reference.py has the
// arithmetic).
//
// One thread block runs on each multiprocessor, and all tiles of a step are divided among the blocks (long/ranges.cuh).
// A producer warpgroup loads tiles, and sums the softmax weights by a product with ones; two compute warpgroups process
// a tile together, first keys and then value dimensions as the rows of products (products.cuh). All three synchronize
// once per tile: when its softmax weights are in shared memory, the slots of its keys and values are free, because the
// values are in registers by then. Values are loaded into registers while the softmax weights are computed, when nothing
// else reads shared memory, and the logits of the next tile are started before the synchronization.
//
// Macros: those of shared/operands.cuh with FP8_PRODUCTS 1, TILE_KEYS 128 and MOST_UNIT in such tiles, ROWS (of a thread
// block, a multiple of 8), SLOTS (of keys, and of values), SHARED_BYTES, FACTOR_ROOM (work items, stored.cuh), RAISE,
// WEIGHT_POWER.
// Grid: one thread block per multiprocessor. Counters are zero before and after.

#define TREE 0
#define HELPS false
#define ALONE 1
#define LEAST_HELPED 0
#define TAIL_TILES 0
#define ITEM_END (ROWS > 8 ? 3 : 1)  // long/share.cuh
#include "ops/paged_attention/few_fp8/queries.cuh"

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    few_fp8(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale, const float* out_scale,
            OUT_TYPE::Storage* out, const __grid_constant__ TensorMap map, const KV_TYPE::Storage* second_line,
            const KV_TYPE::Storage* cache, const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables, float* partial,
            int* counters, float softmax_scale, int table_stride, int block_tokens, int max_tokens, int max_entries,
            int num_requests, unsigned long long* plans, int plan_size) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const Places places = {shared_address(memory)};
  if (threadIdx.x == 0) {
    prefetch_map(&map);
    places.init_barriers();
  }
  const Requests requests = {cu_q, kv_lens, table_stride, block_tokens, max_tokens, num_requests};
  Range& range = *(Range*)(memory + Places::RANGE_AT);
  Place& placed = *(Place*)(memory + Places::PLACE_AT);
  Columns& columns = *(Columns*)(memory + Places::COLUMNS_AT);
  Scales& scales = *(Scales*)(memory + Places::SCALES_AT);
  if (threadIdx.x == 64) {  // which waits for nothing else; of the engine, so no kernel before writes them
    scales.key = K_SCALE ? *k_scale : 1.0f, scales.value = V_SCALE ? *v_scale : 1.0f;
    scales.quanta = STATIC ? __fdiv_rn(1.0f, *out_scale) : 1.0f;
  }
  if (threadIdx.x / 32 == 1) plan_range(range, placed, requests, max_entries, plans, plan_size);
  if (threadIdx.x >= THREADS) places.put_ones(threadIdx.x - THREADS, COMPUTING);
  __syncthreads();
  if (range.begin == range.end) return;
  const volatile Place& place = placed;
  if (threadIdx.x < THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    add_totals(places, columns, requests, range, place, {partial, max_entries},
               {&map, int((cache - second_line) / SIZE) + 1}, block_tables);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_dependencies();
  const Entries stored = {partial, max_entries};
  const Own own;
  const MergedSums all(memory);
  Tiles tiles(places);
  Contexts at;
  at.start_at_end(range);
#pragma unroll 1
  do {
    const Share share = share_of(at, range, place);
    if (share.begin >= share.end) continue;
    const int first_token = at.nth / HEADS * block_tokens;
    const Part part = {at.nth % HEADS, at.start + first_token, min(block_tokens, at.tokens - first_token) * GROUP};
    const int row = threadIdx.x - THREADS;
    Queries queries;
    queries.ask(q, part);  // while others may still need the queries and columns before
    const int position = row < part.rows ? load_int(position_ids + part.token + row / GROUP) : -1;
    meet_computing();
    if (share.begin > 0 && place.count <= 1) {
      wait_for_beginning(counters + (blockIdx.x - 1) * FLAG_STEP);
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) all.of(j) = __ldcg(stored.sums(blockIdx.x - 1) + nth_four(j));
      if (row < ROWS) {
        const float2 its = __ldcg(stored.states(blockIdx.x - 1) + row);
        columns.all_base[row] = its.x, columns.all_total[row] = its.y;
      }
    } else if (Kept(place).merges) {
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) all.of(j) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < ROWS) columns.all_base[row] = minus_infinity(), columns.all_total[row] = 0.0f;
    }
    if (row < ROWS) {
      columns.top[0][row] = columns.top[1][row] = NO_TOP;
      columns.last_key[row] = min(position, at.limit - 1);
    }
    queries.put(places, columns, K_SCALE ? __fmul_rn(softmax_scale, scales.key) : softmax_scale);
    shared_fence();
    meet_computing();  // who brings does not wait for queries: it may still ask for tiles
    tiles.attend(columns, own, share, at.limit,
                 [&](int unit, const float(&item)[HELD]) {
                   const Kept kept(place);
                   finish_sums(item, columns, own, kept.merges, all, stored.sums(kept.merges ? 0 : kept.entry_of(unit)));
                 });
    const float value_scale = scales.value, quanta = scales.quanta;
    const Kept kept(place);
    const auto store_states = [&](int entry) {
      if (row < ROWS) __stcg(stored.states(entry) + row, make_float2(columns.all_base[row], columns.all_total[row]));
    };
    if (kept.is_shared) {
      int* counter = counters + place.counter;
      const int sharing = place.count, count = count_units(place.context.end) - kept.first_unit + 1;
      if (kept.merges) {
        store_states(kept.first_entry);
        all.store(stored.sums(kept.first_entry));
      } else {
        meet_computing();
      }
      stores_are_written();
      if (threadIdx.x == THREADS) wait_for_others(counter, sharing);
      meet_computing();
      merge_stored(memory, columns, stored, kept.first_entry, count, place.nth, sharing, part, out, value_scale, quanta);
      if (threadIdx.x == THREADS) leave_others(counter, sharing);
      return;
    }
    if (share.end < at.tiles) {
      store_states(blockIdx.x);
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) __stcg(stored.sums(blockIdx.x) + nth_four(j), all.of(j));
      tell_next(counters + blockIdx.x * FLAG_STEP);
    } else {
      write_rows(all, columns, own, part, out, value_scale, quanta);
    }
  } while (at.advance(requests, range));
}

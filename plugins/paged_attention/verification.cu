// Paged attention of few tokens, as of a verification: ROWS of a request's rows in a thread block.
//
// Computes the same bits as the Triton kernels of this folder (triton_state.py says how), with the
// products of batch.cu. A cluster of SPLITS thread blocks has ROWS query rows of one request and KV
// head. Each block takes UNITS units at once, a warp each. Then it merges them from left to right, a
// few dimensions of a row to a thread, and hands what it has on to the block with the next units;
// the last one stores it. So all that blocks exchange is one state.
//
// Before the kernel waits for its predecessor it reads the step's numbers, which may still be those
// of a step before. They serve to bring the first tiles to L2, and after the wait to load them at
// once. Then they are compared with the true ones, and where they differ, all is loaded again.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (of keys), GROUP (query heads
// for each), SIZE (64 | 128), TOKENS_PER_BLOCK (a power of two, at least 8), ROWS (8 | 16), UNITS,
// SPLITS, SHARED_BYTES, UNIT (tiles of the first units), K_SCALE, V_SCALE, STATIC.
// Grid: SPLITS, KV heads * blocks of rows, requests.

#include "paged_attention/verification_merge.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    verification(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
                 const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
                 const int* position_ids, const int* cu_q, const int* kv_lens,
                 const int* block_tables, float softmax_scale, int table_stride, int block_tokens,
                 int max_tokens, int num_pages, int num_tokens) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared shared(memory);
  if (SPLITS > 1) {
    if (threadIdx.x == 0) {
      barrier_init(shared.barrier, 1);
      barrier_init_fence();
      barrier_expect(shared.barrier, MESSAGE_BYTES);
    }
    __syncwarp();
    cluster_arrive();
  }
  const int rank = blockIdx.x, request = blockIdx.z, lane = lane_id(), warp = threadIdx.x / 32;
  const int head = blockIdx.y % HEADS, first_token = blockIdx.y / HEADS * block_tokens;
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  const int* table = block_tables + (long long)request * table_stride;
  const u32 keys = shared.tiles + warp * (2 * TILE_BYTES), values = keys + TILE_BYTES;
  Gathered& gathered = *shared.gathered;

  Numbers numbers;
  TileCopier copier(cache, head, table);
  const int first_tile = rank * UNITS + warp;  // units are one tile each there
  First first;
  const auto gather = [&] {
    if (warp == 0) {
      first.read(cu_q, kv_lens, request, table, rank, table_stride, num_pages);
      first.give(gathered);
    }
    __syncthreads();
    numbers = gathered.numbers;
    copier.limit = min(numbers.limit, table_stride * TOKENS_PER_BLOCK);
    copier.take_pages(gathered.pages);
  };
  gather();
  copier.prefetch(first_tile);
  wait_for_dependencies();
  int num_rows;
  while (true) {
    First now;
    if (warp == 0) now.read(cu_q, kv_lens, request, table, rank, table_stride, num_pages);
    copier.copy(keys, first_tile, 0);
    copier.copy(values, first_tile, 1);
    num_rows = min(block_tokens, numbers.end - numbers.start - first_token) * GROUP;
    const int from = numbers.start + first_token;  // token
    stage_queries(shared.queries, q, from, head, num_rows, num_tokens);
    if (warp == 0 && lane < ROWS) {
      const int token = from + lane / GROUP;
      int position = 0;
      if (lane < num_rows && u32(token) < u32(num_tokens)) position = load_int(position_ids + token);
      gathered.positions[lane] = position;
    }
    if (!__syncthreads_or(warp == 0 && now.differs(first))) break;
    wait_for_copies<0>();
    gather();
  }
  launch_dependents();  // not before: what they fill their rings with would delay all of this
  if (SPLITS > 1) cluster_wait();  // every thread block of the cluster has its barrier
  const int count = numbers.end - numbers.start, limit = copier.limit;
  if (count > max_tokens || first_token >= count || limit <= 0) {
    wait_for_copies<0>();
    return;
  }

  Queries queries;
  queries.at = shared.queries + lane * 8;
  int seen[COLUMN_BLOCKS][2], all_see = limit - 1;  // the last key that a column sees, and that all
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + lane % 4 * 2 + c;
      seen[n][c] = row < num_rows ? min(gathered.positions[row], limit - 1) : limit - 1;
      all_see = min(all_see, seen[n][c]);
    }
  }
  all_see = __reduce_min_sync(~0u, all_see);
  const int tiles = (limit + KEYS - 1) / KEYS, units = count_units(tiles);
  const float value_scale = V_SCALE ? *v_scale : 1.0f;
  const float quanta = STATIC ? __fdiv_rn(1.0f, *out_scale) : 1.0f;
  Merged merged;
  merged.clear();
  int tile = first_tile;
#pragma unroll 1
  for (int start = rank * UNITS, round = 0; start < units; start += SPLITS * UNITS, ++round) {
    const int unit = start + warp, next_unit = unit + SPLITS * UNITS;
    if (unit < units) {
      const int end = min(unit_start(unit + 1), tiles);
      const int behind = next_unit < units ? unit_start(next_unit) : tiles;
      State state;
      state.clear();
      bool is_first = true, goes_on;
#pragma unroll 1
      do {
        goes_on = tile + 1 < end;
        const int next = goes_on ? tile + 1 : behind;
        wait_for_copies<1>();
        __syncwarp();
        Logits logits;
        multiply_keys(logits, queries, keys);
        __syncwarp();
        if (next < tiles) copier.load_pages(next);
        if (goes_on) {
          copier.copy(keys, next, 0);
        } else {
          commit_copies();  // as many as where a tile follows
        }
        int last[COLUMN_BLOCKS][2];
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; ++n) {
          last[n][0] = seen[n][0] - tile * KEYS, last[n][1] = seen[n][1] - tile * KEYS;
        }
        u32 weights[COLUMN_BLOCKS][BLOCKS][2];
        soften(state, logits, weights, last, scale, (tile + 1) * KEYS - 1 > all_see, is_first);
        wait_for_copies<1>();
        __syncwarp();
        multiply_values(state.sums, weights, values);
        __syncwarp();
        if (goes_on) copier.copy(values, next, 1);
        is_first = false, tile = next;
      } while (goes_on);
      store_unit(shared, state);
    }
    __syncthreads();
    const bool has_before = start > 0, is_last = start + UNITS >= units;
    const u32 parity = (rank > 0 ? round : round - 1) & 1;
    merged.append(shared, min(units - start, UNITS), has_before, parity);
    if (is_last) {
      const long long at = (numbers.start + first_token) * HEADS + head;
      merged.store({out, value_scale, quanta}, num_rows, at);
    } else if (SPLITS > 1) {
      merged.send(shared, rank + 1 == SPLITS ? 0 : rank + 1);
    }
    if (next_unit - warp < units) {  // the block's next units: their tiles come where parts were
      __syncthreads();
      copier.copy(keys, tile, 0);
      copier.copy(values, tile, 1);
    }
  }
  wait_for_copies<0>();
}

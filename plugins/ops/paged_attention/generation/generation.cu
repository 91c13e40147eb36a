// Paged attention of requests with few tokens, optimized for latency.
//
// Computes the same bits as the Triton kernels (triton/state.py says how): tiles of KEYS keys at fixed positions, one
// online softmax per work item (`unit`: a range of tiles, shared/tiles.py), work items merged from left to right. The
// tensor-core instruction, the order of its k steps, the order of summation in a row (ascending keys of a thread, then
// the lanes at distances 2 and 1) and all fused multiply-adds are the same.
//
// A cluster of SPLITS thread blocks processes one block of query tokens of one request and KV head; each thread block
// processes some of the work items. The state of every work item is sent to the thread blocks that own its rows, in
// chunks of 64 dimensions; each owner merges its chunks. States that do not fit into PARTS_BYTES of shared memory go
// through global memory instead.
//
// Keys and values are loaded from global memory into registers, a whole tile at a time, converted there and stored to
// shared memory for the tensor cores; the next tile is loaded while one is computed.
//
// Before the kernel waits for its predecessor, it reads the step's parameters, which may still be those of the previous
// step. It uses them to prefetch the first tile into L2 and to load it right after the wait. Then it compares them with
// the actual parameters; if they differ, it loads everything again.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head), SIZE
// (64 | 128), TOKENS_PER_BLOCK (a power of two), SPLITS (an even number), PARTS_BYTES, UNIT (tiles of the first work
// items), REGISTERS (maximum per thread), K_SCALE, V_SCALE, STATIC.
// Grid: SPLITS, KV heads * blocks of tokens, requests.

#include "ops/paged_attention/generation/load.cuh"
#include "ops/paged_attention/generation/merge.cuh"

// What a thread block collects in shared memory before it computes.
struct Gathered {
  Numbers numbers;
  Handover plan;
  float value_scale, quanta;
  int pages[32];         // of the first tile
  int positions[ROWS];   // of its tokens
};
static_assert(sizeof(Gathered) <= GATHERED_BYTES, "room for the numbers");

extern "C" __global__ void __maxnreg__(REGISTERS)
    generation(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
               const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
               const int* position_ids, const int* cu_q, const int* kv_lens,
               const int* block_tables, float* partial, int* counters, float softmax_scale,
               int table_stride, int block_tokens, int max_tokens, int num_pages, int num_tokens,
               long long partial_stride) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 keys = shared_address(memory), values = keys + OPERAND_BYTES;
  const u32 queries = values + OPERAND_BYTES, parts_at = queries + OPERAND_BYTES;
  const u32 barrier = parts_at + PARTS_BYTES;
  Gathered& gathered = *(Gathered*)(memory + 3 * OPERAND_BYTES + PARTS_BYTES + 16);
  launch_dependents();
  if (CLUSTERED) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
  }
  const int rank = blockIdx.x, request = blockIdx.z, lane = threadIdx.x;
  const int head = blockIdx.y % HEADS, first_token = blockIdx.y / HEADS * block_tokens;
  const bool gathers = threadIdx.x < 32;
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  if (threadIdx.x == 0) {
    gathered.value_scale = V_SCALE ? *v_scale : 1.0f;
    gathered.quanta = STATIC ? __fdiv_rn(1.0f, *out_scale) : 1.0f;
  }
  Loader loader;
  loader.cache = cache, loader.tables = block_tables;
  loader.offset = head * (TOKENS_PER_BLOCK * SIZE) + own_key() % SPAN * SIZE +
                  own_piece() * (16 / KV_TYPE::bytes);
  loader.table = request * table_stride;

  Numbers numbers;
  Units units;
  int number = 0, page = 0;  // per lane
  const auto gather = [&] {
    if (gathers) {
      number = read_number(cu_q, kv_lens, request);
      numbers = all_numbers(number);
      units.start(rank, (min(numbers.limit, table_stride * TOKENS_PER_BLOCK) + KEYS - 1) / KEYS);
      page = read_page(block_tables + loader.table, units.tile, table_stride, num_pages);
      if (lane == 0) {
        gathered.numbers = numbers;
        gathered.plan.plan(count_units(units.tiles),
                           min(block_tokens, numbers.end - numbers.start - first_token) * GROUP);
      }
      gathered.pages[lane] = page;
    }
    __syncthreads();
    numbers = gathered.numbers;
    units.start(rank, (min(numbers.limit, table_stride * TOKENS_PER_BLOCK) + KEYS - 1) / KEYS);
    loader.take_pages(gathered.pages);
  };
  gather();
  if (!units.done()) loader.prefetch(units.tile);
  wait_for_dependencies();
  uint4 k[LOADS], v[LOADS], x[QUERY_LOADS];
  int num_rows;
  while (true) {
    num_rows = min(block_tokens, numbers.end - numbers.start - first_token) * GROUP;
    int true_number = 0, true_page = 0;
    if (gathers) {
      true_number = read_number(cu_q, kv_lens, request);
      true_page = read_page(block_tables + loader.table, units.tile, table_stride, num_pages);
    }
    if (!units.done()) {
      loader.load(units.tile, k, v);
      load_queries(x, q, numbers.start + first_token, head, num_rows, num_tokens);
    }
    if (gathers) {
      int positions[ROWS / 32];
#pragma unroll
      for (int i = 0; i < ROWS / 32; ++i) {
        const int token = numbers.start + first_token + lane + 32 * i;
        const bool is_used = (lane + 32 * i) * GROUP < num_rows && u32(token) < u32(num_tokens);
        if (is_used) positions[i] = load_int(position_ids + token);
      }
#pragma unroll
      for (int i = 0; i < ROWS / 32; ++i) gathered.positions[lane + 32 * i] = positions[i];
    }
    if (!__syncthreads_or(true_number != number || true_page != page)) break;
    gather();
  }
  if (CLUSTERED) cluster_wait();  // every thread block of the cluster has initialised its barrier
  const int count = numbers.end - numbers.start, limit = numbers.limit;
  if (count > max_tokens || first_token >= count || limit <= 0) return;

  if (threadIdx.x == 0) {
    const int bytes = gathered.plan.units * gathered.plan.owned(rank) * CHUNK_BYTES;
    if (gathered.plan.is_shared && bytes > 0) barrier_expect(barrier, bytes);
  }
  const auto parts = [&] {
    return Parts{gathered.plan.reread(), parts_at, barrier, partial, partial_stride};
  };
  if (!units.done()) {
    const int pages_end = (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
    State state;
    Units next = units;
    next.next();
    if (!next.done()) loader.load_pages(next.tile, pages_end);
    stage_queries(queries, x, num_rows);
    bool is_last = false;
#pragma unroll 1
    while (!is_last) {  // work items
      const int unit = units.unit;
      state.clear();
      bool ends_unit;
#pragma unroll 1
      do {  // tiles
        stage(keys, k);
        shared_fence();
        __syncthreads();
        float s[32];
        start_logits(s, queries, keys);
        clear_from(v, limit - units.tile * KEYS);
        stage(values, v);
        is_last = next.done();
        if (!is_last) loader.prefetch(next.tile);
        shared_fence();
        product_wait<0>();
        keep_order(s);
        __syncthreads();
        int seen[2];  // the last key of the tile that each of the thread's rows sees
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int position = ((volatile int*)gathered.positions)[own_row(r) / GROUP];
          seen[r] = min(position, limit - 1) - units.tile * KEYS;
        }
        u32 weights[16];
        Softening softening;
        softening.find_base<true>(state, s, seen, scale);
        softening.weigh(state, s, weights, scale);
        softening.add_weights(state);
        softening.fade_values(state);
        start_values(state, weights, values);
        if (!is_last) {  // into the registers of the logits
          loader.load(next.tile, k, v);
          Units after = next;
          after.next();
          if (!after.done()) loader.load_pages(after.tile, pages_end);
        }
        product_wait<0>();
        keep_order(state.acc);
        ends_unit = units.ends_unit();
        units = next;
        next.next();
      } while (!ends_unit);
      parts().send(state, unit);
    }
  }
  const Parts all = parts();
  const Handover& plan = all.plan;
  const int owned = plan.owned(rank);
  int* counter = counters + (blockIdx.z * gridDim.y + blockIdx.y) * 32;  // one cache line each
  if (!plan.is_shared) {
    meet_all(counter);
  } else if (owned > 0) {
    barrier_wait_cluster(barrier, 0);
  }
  const Output output = {out, gathered.value_scale, gathered.quanta};
  for (int i = threadIdx.x; i < owned * 16; i += THREADS) {
    const int slot = i / 16, record = i % 16;
    const int chunk = rank * plan.slots + slot, row = chunk / HALVES;
    Merged merged;
    if (plan.is_shared) {
      const float4* records = (const float4*)(memory + (parts_at - keys));
      const float2* states = (const float2*)(records + plan.units * plan.slots * 16);
      merged = merge_units<true>(states + slot, records + i, plan.slots, plan.units);
    } else {
      merged = merge_units<false>(all.states() + chunk, all.records() + chunk * 16 + record,
                                  plan.chunks, plan.units);
    }
    const long long token = gathered.numbers.start + first_token + row / GROUP;
    output.store(merged, (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE +
                             chunk % HALVES * 64 + record / 4 * 16 + record % 4 * 2);
  }
  if (!plan.is_shared) leave_all(counter);
}

// The first four warps (producers) of chunk.cu, partly also of tree.cu: they choose the block's next item and load keys and
// values.
#pragma once

#include "ops/paged_attention/chunk/shared.cuh"

struct Step {
  const int *position_ids, *cu_q, *kv_lens, *block_tables;
  int table_stride, num_requests, min_tokens;
  int first_head, num_heads;  // KV heads of this launch
  const int* context_ends;    // with HAS_CONTEXT
  int first_chunk, num_chunks;  // of this launch, with FP8_PRODUCTS
};

DEVICE int pages_of(int limit) { return (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK; }

DEVICE void meet_loaders() { asm volatile("barrier.sync 1, 128;" ::: "memory"); }

// Reads all requests; a request with fewer than min_tokens has no blocks.
DEVICE void read_requests(const Shared& shared, const Step& step) {
  for (int i = threadIdx.x; i < step.num_requests; i += THREADS) {
    int start = load_int(step.cu_q + i), end = load_int(step.cu_q + i + 1);
    int limit = load_int(step.kv_lens + i);
    const bool is_ours = end - start >= step.min_tokens && limit > 0;
#if HAS_CONTEXT
    if (is_ours) {  // tokens with FP8 products come first
      const int count = fp8_tokens(step.context_ends, step.position_ids, i, start, end - start);
#if FP8_PRODUCTS
      end = start + count, limit = min(limit, load_int(step.position_ids + start) + count);
#else
      start += count;
#endif
    }
#endif
#if ENDS
    start = max(start, end - ENDS);
#endif
    volatile Request& to = shared.request(i);
    to.start = start, to.end = end, to.limit = limit;
    shared.request(i + 1).first_block = is_ours ? (end - start + TOKENS - 1) / TOKENS : 0;
  }
  meet_loaders();
  if (threadIdx.x < 32) {
    int before = 0, chunks = 0;
    if (threadIdx.x == 0) shared.request(0).first_block = 0;
#pragma unroll 1
    for (int first = 0; first < step.num_requests; first += 32) {
      const int i = first + threadIdx.x;
      int sum = i < step.num_requests ? shared.request(i + 1).first_block : 0;
#if FP8_PRODUCTS
      const u32 found = __ballot_sync(~0u, sum > 0);
      const int nth = chunks + __popc(found & ((1u << threadIdx.x) - 1)) - step.first_chunk;
      if (nth < 0 || nth >= step.num_chunks) sum = 0;
      chunks += __popc(found);
#endif
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int left = __shfl_up_sync(~0u, sum, lanes);
        if (threadIdx.x >= lanes) sum += left;
      }
      if (i < step.num_requests) shared.request(i + 1).first_block = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  meet_loaders();
}

// The request that a block of tokens belongs to; every warp searches on its own.
DEVICE int request_of(const Shared& shared, int num_requests, int block) {
  int request = 0;
#pragma unroll 1
  for (int first = 0; first < num_requests; first += 32) {
    const int i = first + threadIdx.x % 32;
    const bool is_before = i < num_requests && shared.request(i + 1).first_block <= block;
    request += __popc(__ballot_sync(~0u, is_before));
  }
  return request;
}

// How many chunks come before that of a request; every warp counts on its own.
DEVICE int nth_chunk(const Shared& shared, int request) {
  int nth = 0;
#pragma unroll 1
  for (int first = 0; first < request; first += 32) {
    const int i = first + threadIdx.x % 32;
    const bool is_chunk =
        i < request && shared.request(i + 1).first_block > shared.request(i).first_block;
    nth += __popc(__ballot_sync(~0u, is_chunk));
  }
  return nth;
}

// Reads item `claim` and lets `source` start to bring its first tile. Blocks at the end of a request come first,
// because they see the most keys.
template <class Source>
DEVICE Item find_item(const Shared& shared, const Step& step, int claim, Source& source) {
  const int block = shared.request(step.num_requests).first_block - 1 - claim / step.num_heads;
  if (block < 0) return {0, 0, 0, 0, 0, 0};
  const int request = request_of(shared, step.num_requests, block);
  const int head = step.first_head + claim % step.num_heads;
  const volatile Request& from = shared.request(request);
  const int limit = min(from.limit, source.most_keys()), token = from.start + (block - from.first_block) * TOKENS;
  const int count = min(TOKENS, from.end - token);
  source.aim(shared, step, request, head, limit);
  const int first_key = load_int(step.position_ids + token);
  const int last_key = load_int(step.position_ids + token + count - 1);
  const int full_tiles = min(first_key + 1, limit) / KEYS;
  const int tiles = (min(last_key + 1, limit) + KEYS - 1) / KEYS;
  return {head, token, count * GROUP, full_tiles, tiles, limit};
}

// Tells the computing warps that something is written.
DEVICE void tell(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Tells the computing warps that keys and values are written. The fence makes them visible to tensor cores. It waits for
// loads that are on their way, too, so there should be none; in the warps that compute it took up to 4 % of the time.
DEVICE void tell_tile(const Shared& shared, int slot) {
  shared_fence();
  tell(shared.full_keys(slot));
  tell(shared.full_values(slot));
}

// Tiles that are converted in registers. A tile is loaded when the one before is told, because a fence waits for loads.
struct Converted {
  uint4 k[LOADS], v[LOADS];

  DEVICE void begin(Loader& loader, const Item& item) {
    loader.load(0, k, v);
    if (item.tiles > 1) loader.load_pages(1, pages_of(item.limit));
  }
  DEVICE void bring(const Shared& shared, Loader& loader, const Item& item, Ring<STAGES>& ring) {
    const u32 place = own_place();
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile, ring.advance()) {
      barrier_wait(shared.empty_keys(ring.slot), ring.parity ^ 1);
      stage(shared.keys(ring.slot), k, place);
      barrier_wait(shared.empty_values(ring.slot), ring.parity ^ 1);
      clear_from(v, item.limit - tile * KEYS);
      stage(shared.values(ring.slot), v, place);
      tell_tile(shared, ring.slot);
      if (tile + 1 < item.tiles) loader.load(tile + 1, k, v);
      if (tile + 2 < item.tiles) loader.load_pages(tile + 2, pages_of(item.limit));
    }
  }
};

// Tiles that are copied without conversion.
struct Copied {
  DEVICE void begin(Loader&, const Item&) {}
  DEVICE void bring(const Shared& shared, Loader& loader, const Item& item, Ring<STAGES>& ring) {
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile, ring.advance()) {
      const int left = item.limit - tile * KEYS;
      barrier_wait(shared.empty_keys(ring.slot), ring.parity ^ 1);
      loader.copy(tile, 0, shared.keys(ring.slot), left);
      barrier_wait(shared.empty_values(ring.slot), ring.parity ^ 1);
      loader.copy(tile, 1, shared.values(ring.slot), left);
      if (tile + 1 < item.tiles) loader.load_pages(tile + 1, pages_of(item.limit));
      asm volatile("cp.async.wait_all;" ::: "memory");
      tell_tile(shared, ring.slot);
    }
  }
};

#if !FP8_PRODUCTS  // where each warpgroup loads its own

// Loads an item's queries by four warps, COUNT of a thread's pieces at a time.
template <int COUNT>
DEVICE void bring_queries(const Shared& shared, const Item& item, const MODEL_TYPE::Storage* q,
                          int slot, u32 thread) {
  constexpr int PER_ROW = SIZE / 8, ROW_STEP = THREADS / PER_ROW;
  const int first_row = thread / PER_ROW, piece = thread % PER_ROW;
#pragma unroll 1
  for (int some = first_row; some < 64 * WARPGROUPS; some += COUNT * ROW_STEP) {
    uint4 x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {  // a row past the end is a copy of the last row
      const int row = min(some + i * ROW_STEP, item.rows - 1);
      const int at = (item.head * GROUP + row % GROUP) * SIZE + piece * 8;
      load_piece(x[i], q + (long long)(item.token + row / GROUP) * (HEADS * GROUP * SIZE) + at);
    }
    const u32 target = shared.queries(slot, some / 64) + piece / 8 * HALF_BYTES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = some % 64 + i * ROW_STEP;
      store_shared(target + row * 128 + ((piece % 8 ^ (row & 7)) << 4), to_inner(x[i].x),
                   to_inner(x[i].y), to_inner(x[i].z), to_inner(x[i].w));
    }
  }
}

#endif

// Loads queries and parameters of an item; an item without tiles means that there are no more.
DEVICE void bring_item(const Shared& shared, const Item& item, const MODEL_TYPE::Storage* q,
                       u32 nth) {
  barrier_wait(shared.empty_item(nth % 2), nth / 2 % 2 ^ 1);
  if (threadIdx.x == 0) {
    volatile Item& to = shared.item(nth % 2);
    to.head = item.head;
    to.token = item.token;
    to.rows = item.rows;
    to.full_tiles = item.full_tiles;
    to.tiles = item.tiles;
    to.limit = item.limit;
  }
#if !FP8_PRODUCTS
  if (item.tiles > 0) bring_queries<4>(shared, item, q, nth % 2, thread_from_here());
#endif
  shared_fence();
  tell(shared.full_item(nth % 2));
}

// Tiles that four warps bring from the pages of the cache.
struct Paged {
  Loader loader;
  Either<IS_FP8, Converted, Copied>::Type tiles;

  static DEVICE int most_keys() { return 0x7fffffff; }
  DEVICE void aim(const Shared&, const Step& step, int request, int head, int limit) {
    loader.aim(head, request * step.table_stride);
    loader.load_pages(0, pages_of(limit));
  }
  DEVICE void begin(const Item& item) { tiles.begin(loader, item); }
  DEVICE void bring(const Shared& shared, const Item& item, Ring<STAGES>& ring) {
    tiles.bring(shared, loader, item, ring);
  }
};

DEVICE int num_blocks() {  // queried here and not earlier, to save a register
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

template <class Source>
DEVICE void bring_items(const Shared& shared, const Step& step, const MODEL_TYPE::Storage* q,
                        Source& source, int* counter) {
  read_requests(shared, step);
  Ring<STAGES> ring;
  int claim = blockIdx.x;
#pragma unroll 1
  for (u32 nth = 0;; ++nth) {
    const Item item = find_item(shared, step, claim, source);
    bring_item(shared, item, q, nth);
    if (item.tiles == 0) return;
    source.begin(item);
    int next = 0;
    if (threadIdx.x == 0) {
      next = atomicAdd(counter, 1);  // once per item
      const int items = shared.request(step.num_requests).first_block * step.num_heads;
      if (next + 1 == items) *counter = 0;
    }
    source.bring(shared, item, ring);
    if (threadIdx.x == 0) shared.claim() = next + num_blocks();
    meet_loaders();
    claim = shared.claim();
    meet_loaders();
  }
}

// Writes keys and values of requests with context chunks as operands of FP8 products, for chunk_fp8.cu: for each request
// that has tokens before its `context_ends`, all keys up to the last of these tokens, followed by zeros.
//
// Keys are rows of 128 bytes, as in the cache. Values are transposed: a row is a dimension, and its 128 bytes are the
// tile's keys in the order in which threads hold their softmax weights: of every 16 keys, 2 t, 2 t + 1, 8 + 2 t and
// 9 + 2 t for t from 0 to 3. Both have the 128-byte swizzle that wgmma reads.
//
// Macros: those of shared/operands.cuh, FP8_PRODUCTS 1, TILE_KEYS 128, EVERY_TOKEN (as for chunk_fp8.cu).
// Grid: any size; four thread blocks fit on a multiprocessor. Each processes one tile of a head after another.

#include "ops/paged_attention/chunk/image_places.cuh"

constexpr int PITCH = SIZE + 4;  // bytes of a key in shared memory: dimensions of keys that are read together are on other banks

// A request and how many of its keys are written.
struct Chunk {
  int request, limit;
};

// The first request from `request` on with tokens that are chunk_fp8.cu's; num_requests if there is none. A warp reads 32
// at once, as each read takes as long as writing a tile.
DEVICE Chunk next_chunk(int request, const int* position_ids, const int* cu_q, const int* kv_lens,
                        const int* context_ends, int num_requests, int min_tokens) {
  for (; request < num_requests; request += 32) {
    const int i = request + threadIdx.x % 32;
    int limit = 0;
    if (i < num_requests) {
      const int start = load_int(cu_q + i), count = load_int(cu_q + i + 1) - start;
      const int kv_len = load_int(kv_lens + i);
      if (count >= min_tokens && kv_len > 0) {
        const int tokens = fp8_tokens(context_ends, position_ids, i, start, count);
        if (tokens > 0) limit = min(kv_len, load_int(position_ids + start) + tokens);
      }
    }
    const u32 found = __ballot_sync(~0u, limit > 0);
    if (found == 0) continue;
    const int lane = __ffs(found) - 1;
    return {request + lane, __shfl_sync(~0u, limit, lane)};
  }
  return {num_requests, 0};
}

// Writes 16 bytes of a dimension's row: 16 keys from `first` on.
DEVICE void write_values(u8* image, const u8* tile, int dimension, int first) {
  u32 w[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    w[t] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[t] |= u32(tile[(first + 2 * t + i % 2 + i / 2 * 8) * PITCH + dimension]) << (8 * i);
    }
  }
  *(uint4*)(image + dimension * KEYS + ((first / 16 ^ (dimension & 7)) << 4)) = {w[0], w[1], w[2], w[3]};
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    images_fp8(const KV_TYPE::Storage* cache, const int* position_ids, const int* cu_q, const int* kv_lens,
               const int* block_tables, const int* context_ends, u8* first, int table_stride, int num_requests,
               int min_tokens, int room_tiles, int first_head, int num_heads, int first_chunk, int num_chunks) {
  static_assert(KEYS == 128 && SIZE == THREADS, "a thread for each dimension");
  __shared__ u32 memory[KEYS * PITCH / 4];
  launch_dependents();
  wait_for_dependencies();
  const Images to = {first, room_tiles, num_heads};
  const int piece = own_piece(), key = own_key();
  Loader loader;
  loader.cache = cache, loader.tables = block_tables;
  int at = blockIdx.x, request = -1;
#pragma unroll 1
  for (int chunk = 0; chunk < first_chunk + num_chunks; ++chunk) {
    const Chunk its = next_chunk(request + 1, position_ids, cu_q, kv_lens, context_ends, num_requests, min_tokens);
    request = its.request;
    if (request >= num_requests) return;
    if (chunk < first_chunk) continue;
    const int limit = min(its.limit, room_tiles * KEYS);
    const int end = (limit + KEYS - 1) / KEYS * num_heads;
#pragma unroll 1
    for (; at < end; at += gridDim.x) {
      const int tile = at / num_heads, head = at % num_heads;
      uint4 k[LOADS], v[LOADS];
      load_tile(loader, tile, first_head + head, request * table_stride, limit, k, v);
      u8* image = to.of(chunk - first_chunk, tile, head);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int row = key + i * KEY_STEP;
        *(uint4*)(image + row * SIZE + ((piece ^ (row & 7)) << 4)) = k[i];
        u32* mine = memory + (row * PITCH + 16 * piece) / 4;
        mine[0] = v[i].x, mine[1] = v[i].y, mine[2] = v[i].z, mine[3] = v[i].w;
      }
      __syncthreads();
#pragma unroll
      for (int keys = 0; keys < KEYS; keys += 16) {
        write_values(image + IMAGE_BYTES, (const u8*)memory, threadIdx.x, keys);
      }
      __syncthreads();
    }
    at -= end;
  }
}

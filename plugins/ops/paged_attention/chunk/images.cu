// Converts keys and values of requests with context chunks to tensor-core operands ("images"), for chunk.cu.
//
// Each block of query tokens (16 tokens of 8 query heads) reads all keys before it, so without this kernel every byte
// would be converted once per block. Here it is converted once, and chunk.cu copies the result. Zeros follow a request's
// last key.
//
// Macros: those of shared/operands.cuh.
// Grid: any size; eight thread blocks (four for 16-bit types) fit on a multiprocessor. Each processes one tile of a head
// after another.

#include "ops/paged_attention/chunk/image_places.cuh"

DEVICE void store_global(u8* to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Stores pieces of a tile in the layout of `stage`. FP8: two neighbouring threads have neighbouring pieces, which become
// two times 32 bytes. They exchange halves, so that together they store 32 bytes at a time: half sectors take L2 longer.
DEVICE void write_image(u8* image, const uint4 (&x)[LOADS], u32 place) {
  const bool is_odd = threadIdx.x % 2;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    u8* to = image + i * (KEY_STEP * 128);
    if (IS_FP8) {
      u32 w[8];
      widen(x[i].x, w[0], w[1]), widen(x[i].y, w[2], w[3]);
      widen(x[i].z, w[4], w[5]), widen(x[i].w, w[6], w[7]);
      u32 even[4], odd[4];  // of this thread's sixteen bytes of the even thread's piece, and of the odd thread's
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 given = __shfl_xor_sync(~0u, is_odd ? w[k] : w[4 + k], 1);
        even[k] = is_odd ? given : w[k], odd[k] = is_odd ? w[4 + k] : given;
      }
      store_global(to + (is_odd ? place ^ 48 : place), even[0], even[1], even[2], even[3]);
      store_global(to + (is_odd ? place ^ 16 : place ^ 32), odd[0], odd[1], odd[2], odd[3]);
    } else {
      store_global(to + place, x[i].x, x[i].y, x[i].z, x[i].w);
    }
  }
}

// The first request from `request` on that is a chunk and has keys; num_requests if there is none. A warp reads 32 at
// once, as each read takes as long as converting a tile, and most of many requests generate.
DEVICE int next_chunk(int request, const int* cu_q, const int* kv_lens, int num_requests,
                      int min_tokens) {
  for (; request < num_requests; request += 32) {
    const int i = request + threadIdx.x % 32;
    bool is_chunk = false;
    if (i < num_requests) {
      const int start = load_int(cu_q + i), end = load_int(cu_q + i + 1);
      is_chunk = load_int(kv_lens + i) > 0 && end - start >= min_tokens;
    }
    const u32 found = __ballot_sync(~0u, is_chunk);
    if (found != 0) return request + __ffs(found) - 1;
  }
  return num_requests;
}

extern "C" __global__ void __launch_bounds__(THREADS, IS_FP8 ? 8 : 4)
    images(const KV_TYPE::Storage* cache, const int* cu_q, const int* kv_lens,
           const int* block_tables, u8* first, int table_stride, int num_requests, int min_tokens,
           int room_tiles, int first_head, int num_heads) {
  launch_dependents();
  wait_for_dependencies();
  const Images to = {first, room_tiles, num_heads};
  const u32 place = own_place();
  Loader loader;
  loader.cache = cache, loader.tables = block_tables;
  int at = blockIdx.x, chunk = 0, request = -1;
#pragma unroll 1
  while (true) {
    request = next_chunk(request + 1, cu_q, kv_lens, num_requests, min_tokens);
    if (request >= num_requests) return;
    const int limit = min(load_int(kv_lens + request), room_tiles * KEYS);
    const int end = (limit + KEYS - 1) / KEYS * num_heads;
#pragma unroll 1
    for (; at < end; at += gridDim.x) {
      const int tile = at / num_heads, head = at % num_heads;
      uint4 k[LOADS], v[LOADS];
      load_tile(loader, tile, first_head + head, request * table_stride, limit, k, v);
      u8* image = to.of(chunk, tile, head);
      write_image(image, k, place);
      write_image(image + OPERAND_BYTES, v, place);
    }
    at -= end;
    ++chunk;
  }
}

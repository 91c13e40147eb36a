// Where images.cu writes keys and values as operands of tensor cores, and chunk.cu reads them.
#pragma once

#include "ops/paged_attention/shared/operands.cuh"

// [chunks, tiles, heads, keys or values]: IMAGE_BYTES each. Requests that are too short to be chunks have no room.
struct Images {
  u8* first;
  int tiles, heads;  // room for so many tiles a chunk; KV heads

  DEVICE u8* of(int chunk, int tile, int head) const {
    return first + (((long long)chunk * tiles + tile) * heads + head) * (2 * IMAGE_BYTES);
  }
};

// Loads what a thread has of a head's tile, zeros from the request's key `limit` on. table: its first entry.
DEVICE void load_tile(Loader& loader, int tile, int head, int table, int limit, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) {
  loader.aim(head, table);
  loader.load_pages(tile, (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK);
  loader.load(tile, k, v);
  clear_from(k, limit - tile * KEYS);
  clear_from(v, limit - tile * KEYS);
}

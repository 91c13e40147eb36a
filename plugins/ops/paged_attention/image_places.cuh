// Where images.cu writes keys and values as operands of tensor cores, and chunk.cu reads them.
#pragma once

#include "ops/paged_attention/operands.cuh"

// [chunks, tiles, heads, keys or values]: IMAGE_BYTES each. Requests that are too short to be chunks have no room.
struct Images {
  u8* first;
  int tiles, heads;  // room for so many tiles a chunk; KV heads

  DEVICE u8* of(int chunk, int tile, int head) const {
    return first + (((long long)chunk * tiles + tile) * heads + head) * (2 * IMAGE_BYTES);
  }
};

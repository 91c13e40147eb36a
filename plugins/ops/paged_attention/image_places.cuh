// Where images.cu writes keys and values as operands of tensor cores, and chunk.cu reads them.
#pragma once

#include "ops/paged_attention/operands.cuh"

// [requests, tiles, heads, keys or values]: OPERAND_BYTES each.
struct Images {
  u8* first;
  int tiles, heads;  // room for so many tiles a request; KV heads

  DEVICE u8* of(int request, int tile, int head) const {
    return first + (((long long)request * tiles + tile) * heads + head) * (2 * OPERAND_BYTES);
  }
};

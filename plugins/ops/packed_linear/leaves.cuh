// A product whose K is added in LEAVES parts, each a sum of its own: part l has its rows behind those of part l - 1,
// as many, in the weight and in `out`, and multiplies the l-th part of a token's columns. all_reduce adds them.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

#ifndef LEAVES
#define LEAVES 1
#endif

struct Leaf {
  int row_tiles, chunks;  // of one part

  DEVICE Leaf(int all_row_tiles, int chunks_) : row_tiles(all_row_tiles / LEAVES), chunks(chunks_) {}
  // Where its part of a token begins, in chunks of the weight.
  DEVICE int first_chunk(int row_tile) const {
    if constexpr (LEAVES == 1) return 0;
    else return row_tile / row_tiles * chunks;
  }
};

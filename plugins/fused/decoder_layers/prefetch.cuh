// The small tensors of a layer, brought to L2 before they are read: queued behind weights, a read from memory takes
// longer than blocks wait for each other. Each block asks for the scales of its rows and its part of what all read.
#pragma once

#include "fused/decoder_layers/chain.cuh"

// The scales of this block's rows.
template <class S>
DEVICE void prefetch_scales(u64 scales) {
  const Share<S> share;
  for (int i = 0; i < share.count; ++i) {
    prefetch(scales + (share.first + i * NUM_BLOCKS) * (S::GROUP_ROWS * 4));
  }
}
// NVRTC 13.2 does not know __builtin_offsetof.
#define FIELD_OF(NAME) (int((const char*)&((const Layer*)0)->NAME - (const char*)0) / 8)
// Whether a layer's i-th field, none of a norm's, is one scale.
DEVICE bool is_scale(int i) {
  return i < FIELD_OF(qkv_norm) ? i % 4 == FIELD_OF(qkv.x_scale) : i != FIELD_OF(cache);
}
// Prefetches what a thread's field of the next layer points to, except weights and cache: data that all blocks
// read, one line by each block.
DEVICE void prefetch_field(u64 field) {
  const int i = threadIdx.x, block = blockIdx.x;
  if (i >= sizeof(Layer) / 8 || !field) return;
  if (i == FIELD_OF(qkv.weight_scale)) {
    prefetch_scales<QkvSize>(field);
  } else if (i == FIELD_OF(o.weight_scale)) {
    prefetch_scales<OSize>(field);
  } else if (i == FIELD_OF(gate_up.weight_scale)) {
    prefetch_scales<GateUpSize>(field);
  } else if (i == FIELD_OF(down.weight_scale)) {
    prefetch_scales<DownSize>(field);
  } else if (i == FIELD_OF(qkv_norm) || i == FIELD_OF(mlp_norm)) {
    if (block < HIDDEN / 64) prefetch(field + block * 128);
  } else if (i == block && is_scale(i)) {
    prefetch(field);
  }
}

// With 4-bit weights a copying warp that has nothing to copy does the same for all layers but the first: those that
// compute would be late by as much as one of them spends here. It rests between layers so as not to ask for all at once
// when the first weights are waited for, and is ahead of them all the same (a layer takes 12 us and more).
constexpr bool IS_PREFETCHED_BY_A_WARP = CHUNKS < COPY / 32;

template <class S>
DEVICE void prefetch_share(const float* scales, int block, int lane) {
  const int first = block < S::TURN ? block - S::TURN + NUM_BLOCKS : block - S::TURN, group = first + lane * NUM_BLOCKS;
  static_assert(S::MOST <= 32, "a lane for each group of rows");
  if (scales && group < S::GROUPS) prefetch((u64)scales + group * (S::GROUP_ROWS * 4));
}
DEVICE void prefetch_layers(const Layer* all, int num_layers) {
#pragma unroll 1
  for (int l = 1; l < num_layers; ++l) {
    const Layer* its = all + l;
    const int lane = anew(lane_id()), block = anew(blockIdx.x);
    const u64 field = lane < int(sizeof(Layer) / 8) ? __ldg((const u64*)its + lane) : 0;
    const bool is_norm = lane == FIELD_OF(qkv_norm) || lane == FIELD_OF(mlp_norm);
    if (field && is_norm && block < HIDDEN / 64) prefetch(field + block * 128);
    if (field && !is_norm && is_scale(lane) && lane == block) prefetch(field);
    prefetch_share<QkvSize>(its->qkv.weight_scale, block, lane);
    prefetch_share<OSize>(its->o.weight_scale, block, lane);
    prefetch_share<GateUpSize>(its->gate_up.weight_scale, block, lane);
    prefetch_share<DownSize>(its->down.weight_scale, block, lane);
    __nanosleep(5000);  // about 5 us
  }
}
#undef FIELD_OF

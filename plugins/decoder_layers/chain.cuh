// What the stages of layers.cu have in common: a layer's tensors, shared memory, and which part of a
// product a thread block takes.
#pragma once

#include "packed_linear/hopper.cuh"
#include "packed_linear/norm_math.cuh"

typedef MODEL_TYPE::Storage Value;
typedef KV_TYPE::Storage Cached;

struct Weights {  // FP8, and what turns sums into numbers
  const u8* weight;
  const float *weight_scale, *x_scale;
  const Value* bias;
};

// The tensors of one layer, in the order of `layer_fields` (chain.py). Null where there is none.
struct Layer {
  Weights qkv, o, gate_up, down;
  const uint4 *qkv_norm, *mlp_norm;
  const float* activated_scale;
  Cached* cache;
  const float *k_scale, *v_scale, *attended_scale;
};

constexpr int COMPUTE = 256, WARPS = COMPUTE / 32;  // threads that compute; one more warp copies
constexpr int INTERVAL_BYTES = 512;                 // of K, summed by one chain of products
constexpr int GROUP_ROWS = 16;                      // weight rows that a block takes at once
constexpr int UNIT_INTERVALS = 4;
constexpr int UNIT_BYTES = GROUP_ROWS * UNIT_INTERVALS * INTERVAL_BYTES;
constexpr int OPERAND_ROWS = (UNIT_INTERVALS * TOKENS + 7) / 8 * 8;  // columns of a product
constexpr int OPERAND_BYTES = 4 * OPERAND_ROWS * 128;                // tokens at four intervals
constexpr int SUM_BYTES = TOKENS * UNIT_INTERVALS * GROUP_ROWS * 4;  // of a unit

constexpr int QKV_ROWS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, ATTENDED = NUM_HEADS * HEAD_SIZE;

// A product of ROWS weight rows by K. A layer's products take the blocks in turn: one begins where the
// one before it ended, so that what does not divide evenly evens out.
template <int ROWS, int K_, int TURN_>
struct Size {
  static constexpr int K = K_, TURN = TURN_, GROUPS = ROWS / GROUP_ROWS;
  static constexpr int INTERVALS = K / INTERVAL_BYTES;
  static constexpr int UNITS = (INTERVALS + UNIT_INTERVALS - 1) / UNIT_INTERVALS;  // of a group
  static constexpr int NEXT_TURN = (TURN + GROUPS) % NUM_BLOCKS;
  static constexpr int SHARERS = GROUPS < NUM_BLOCKS ? GROUPS : NUM_BLOCKS;  // blocks with a part
  static_assert(ROWS % 64 == 0 && K % INTERVAL_BYTES == 0, "whole tiles and intervals");
  static_assert((GROUPS + NUM_BLOCKS - 1) / NUM_BLOCKS * TOKENS <= 4 * WARPS,
                "a block's sums are finished at once");
};
typedef Size<QKV_ROWS, HIDDEN, 0> QkvSize;
typedef Size<HIDDEN, ATTENDED, QkvSize::NEXT_TURN> OSize;
typedef Size<2 * INTERMEDIATE, HIDDEN, OSize::NEXT_TURN> GateUpSize;
typedef Size<HIDDEN, INTERMEDIATE, GateUpSize::NEXT_TURN> DownSize;
template <class S>
constexpr bool HAS_ROOM = TOKEN_BYTES >= (S::INTERVALS + 3) / 4 * OPERAND_BYTES &&
                          ROOM >= TOKEN_BYTES + (S::GROUPS + NUM_BLOCKS - 1) / NUM_BLOCKS *
                                                    S::UNITS * SUM_BYTES;
static_assert(HAS_ROOM<QkvSize> && HAS_ROOM<OSize> && HAS_ROOM<GateUpSize> && HAS_ROOM<DownSize>,
              "tokens and sums of every product");
static_assert(GateUpSize::GROUPS >= NUM_BLOCKS, "no block is far behind another: exchange.cuh");

// The groups of rows of a product that fall to this block: first, first + NUM_BLOCKS, ...
template <class S>
struct Share {
  int first, count;
  DEVICE Share() {
    first = int(blockIdx.x) - S::TURN;
    if (first < 0) first += NUM_BLOCKS;
    count = first < S::GROUPS ? (S::GROUPS - first + NUM_BLOCKS - 1) / NUM_BLOCKS : 0;
  }
};

// Shared memory: a ring of weights, ROOM for tokens and sums or for attention, sums of squares.
struct Shared {
  u32 ring, tokens, sums, squares;
  u32 full, empty;  // barriers: full has one for each quarter of a slot
  DEVICE explicit Shared(u32 base) {
    ring = (base + 1023) & ~1023u;
    tokens = ring + STAGES * UNIT_BYTES;
    sums = tokens + TOKEN_BYTES;
    squares = tokens + ROOM;
    full = squares + 2 * 128;
    empty = full + 8 * 4 * STAGES;
  }
};

DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTE) : "memory"); }

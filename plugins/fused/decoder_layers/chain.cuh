// What the stages of layers.cu share: a layer's tensors, shared memory, and the division of a product among
// thread blocks.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"
#include "schemes/mxfp4/mxfp4.cuh"
#include "backends/cuda/sm90/norm_math.cuh"

typedef MODEL_TYPE::Storage Value;
typedef KV_TYPE::Storage Cached;

struct Weights {  // FP8 or MXFP4 weights, and the scales of their sums
  const u8* weight;
  const float *weight_scale, *x_scale;
  const Value* bias;
};

// The tensors of one layer, in the order of `layer_fields` (chain.py). Null if a layer has none.
struct Layer {
  Weights qkv, o, gate_up, down;
  const uint4 *qkv_norm, *mlp_norm;
  const float* activated_scale;
  Cached* cache;
  const float *k_scale, *v_scale, *attended_scale;
};
static_assert(sizeof(Layer) == 23 * 8, "as kernel.py has it");

constexpr bool IS_LONG = MAX_UNITS > 32;  // contexts beyond 4,096 tokens: tiles come through the ring (attend_long.cuh)
static_assert(!IS_LONG || (!MXFP4 && HELD == 0), "nothing else takes units of the ring, and units have room for tiles");

constexpr int COMPUTE = 256, WARPS = COMPUTE / 32;  // threads that compute
constexpr int COPY = 128;                           // threads that copy
constexpr int HOLD = HELD > 0 ? 128 : 0;            // threads that hold weights in registers
// Registers per thread. A multiprocessor has 512 for one thread of each of four warps; a held ring unit takes 64.
constexpr int COPY_REGISTERS = IS_LONG ? 72 : MXFP4 ? 56 : 40, HOLD_REGISTERS = 40 + 64 * HELD;
constexpr int COMPUTE_REGISTERS = HELD > 0 ? (512 - COPY_REGISTERS - HOLD_REGISTERS) / 16 * 8 : IS_LONG ? 216 : MXFP4 ? 224 : 232;
constexpr int THREADS = COMPUTE + COPY + HOLD, AT_START = 65536 / THREADS / 8 * 8;  // registers of each
static_assert(COMPUTE * COMPUTE_REGISTERS + COPY * COPY_REGISTERS + HOLD * HOLD_REGISTERS <= AT_START * THREADS,
              "more registers than the block starts with: setmaxnreg would wait for ever");
constexpr int INTERVAL_BYTES = 512;                 // of K, summed by one chain of wgmma
constexpr int CHUNKS = MXFP4 ? 2 : 4;               // packed blocks of an interval
constexpr int ROW_BYTES = MXFP4 ? 136 : 128;        // of a row of a packed block
constexpr int BLOCK_BYTES = 64 * ROW_BYTES;
constexpr int UNIT_BYTES = CHUNKS * BLOCK_BYTES;    // weight rows times intervals of K: 64
constexpr int SUM_BYTES = TOKENS * 64 * 4;          // per ring unit

constexpr int QKV_ROWS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, ATTENDED = NUM_HEADS * HEAD_SIZE;

// A product of ROWS weight rows by K. A block processes groups of GROUP_ROWS rows: 16, whose ring units have
// 4 intervals of K, or 8, whose ring units have 8. A ring unit is what one slot of the ring holds. Each product
// of a layer starts at the block after the last one of the previous product, so that remainders are spread.
template <int ROWS, int K_, int GROUP_ROWS_, int TURN_, int HELD_ = 0>
struct Size {
  static constexpr int K = K_, TURN = TURN_, GROUP_ROWS = GROUP_ROWS_, GROUPS = ROWS / GROUP_ROWS;
  static constexpr int HELD_UNITS = HELD_;  // of a block, held in registers (hold.cuh)
  static constexpr int INTERVALS = K / INTERVAL_BYTES, UNIT_INTERVALS = 64 / GROUP_ROWS;
  static constexpr int UNITS = (INTERVALS + UNIT_INTERVALS - 1) / UNIT_INTERVALS;  // of a group of rows
  static constexpr int OPERAND_ROWS = (UNIT_INTERVALS * TOKENS + 7) / 8 * 8;  // columns of a product
  static constexpr int OPERAND_BYTES = 4 * OPERAND_ROWS * 128;  // the tokens at a ring unit's intervals
  static constexpr int TOKEN_BYTES = UNITS * OPERAND_BYTES;
  static constexpr int NEXT_TURN = (TURN + GROUPS) % NUM_BLOCKS;
  static constexpr int SHARERS = GROUPS < NUM_BLOCKS ? GROUPS : NUM_BLOCKS;  // blocks with a share of the product
  static constexpr int MOST = (GROUPS + NUM_BLOCKS - 1) / NUM_BLOCKS;        // the most groups of a block
  static_assert(ROWS % 64 == 0 && K % INTERVAL_BYTES == 0, "whole tiles and intervals");
  static_assert(MOST * TOKENS <= 4 * WARPS, "a block's sums are finished at once");
  static_assert(ROOM >= TOKEN_BYTES + MOST * UNITS * SUM_BYTES, "tokens and sums");
};
typedef Size<QKV_ROWS, HIDDEN, 16, 0> QkvSize;  // 16: the epilogue combines rows 8 apart
typedef Size<HIDDEN, ATTENDED, O_GROUP, QkvSize::NEXT_TURN> OSize;
typedef Size<2 * INTERMEDIATE, HIDDEN, 16, OSize::NEXT_TURN, HELD> GateUpSize;
typedef Size<HIDDEN, INTERMEDIATE, DOWN_GROUP, GateUpSize::NEXT_TURN> DownSize;
static_assert(GateUpSize::GROUPS >= NUM_BLOCKS, "no block is far behind another: exchange.cuh");

// The groups of rows of a product that this block computes: first, first + NUM_BLOCKS, ...
template <class S>
struct Share {
  int first, count;
  DEVICE Share() {
    first = int(blockIdx.x) - S::TURN;
    if (first < 0) first += NUM_BLOCKS;
    count = first < S::GROUPS ? (S::GROUPS - first + NUM_BLOCKS - 1) / NUM_BLOCKS : 0;
  }
};

// Shared memory: the table of 4-bit numbers, a ring of weights, ROOM for tokens and sums or for attention,
// sums of squares, this layer's tensors and the next one's.
struct Shared {
  u32 base, table, ring, tokens, squares, layers;
  u32 full, empty;  // barriers: full has one for each chunk of a slot
  u32 room, came, came_queries;  // of fetch.cuh; the last has one for each team
  DEVICE explicit Shared(u32 base_) : base(base_) {
    table = (base + 255) & ~255u;
    ring = (base + (MXFP4 ? 255 + MXFP4_TABLE_BYTES : 0) + 1023) & ~1023u;
    tokens = ring + STAGES * UNIT_BYTES;
    squares = tokens + ROOM;
    layers = squares + 2 * 128;
    full = layers + 2 * sizeof(Layer);
    empty = full + 8 * CHUNKS * STAGES;
    room = empty + 8 * STAGES, came = room + 8, came_queries = came + 8;
  }
  // The sums of a product's ring units, stored after its tokens.
  template <class S>
  DEVICE u32 sums() const {
    return tokens + S::TOKEN_BYTES;
  }
};

// The same number, but opaque to the compiler. Otherwise, with two tokens or 4-bit weights, values derived from it
// would be kept from layer to layer and spill.
DEVICE int anew(int x) {
  if (TOKENS > 1 || MXFP4) asm volatile("" : "+r"(x));
  return x;
}
// Forces the value to be computed by this point: work that other blocks wait for should not start with
// computing addresses.
DEVICE void made(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE void made(const u8*& x) { asm volatile("" : "+l"(x)); }
// Prefetches to L2: queued behind weights, a read from memory takes longer than blocks wait for each other.
DEVICE void prefetch(u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTE) : "memory"); }
// Includes the threads of hold.cuh. Barriers 2 and 3 belong to teams (attend_unit.cuh).
constexpr int QKV_IS_DONE = 4, TOKENS_ARE_THERE = 5, SUMS_ARE_THERE = 6;
template <int BARRIER>
DEVICE void holders_meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(COMPUTE + HOLD) : "memory");
}
template <int BARRIER>
DEVICE void holders_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(COMPUTE + HOLD) : "memory");
}

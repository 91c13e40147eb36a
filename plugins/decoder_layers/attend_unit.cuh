// Units of attention in layers.cu: what they are, and how a warp takes one, with the code of batch.cu.
//
// The keys and values of the step's own tokens come from the blocks that made them, all others from
// the cache, and those are on their way before the queries are there.
//
// Its macros hold until the end of attend.cuh.
#pragma once

#include "decoder_layers/exchange.cuh"

#define HEADS NUM_KV_HEADS
#define GROUP (NUM_HEADS / NUM_KV_HEADS)
#define SIZE HEAD_SIZE
#define COLUMNS 8
#define SLOTS 3
#define QUERY_BYTES 0
#define UNIT 1
namespace attention {
#include "paged_attention/batch_state.cuh"

static_assert(TOKENS * GROUP <= COLUMNS, "the rows of a request are the columns of a product");
constexpr int SLICES = NUM_BLOCKS / HEADS;  // blocks that merge a head
constexpr int PAIRS = TOKENS * GROUP * SIZE / 2;  // of dimensions, of a head
constexpr int SLICE_PAIRS = (PAIRS + SLICES - 1) / SLICES;
constexpr int MERGER = WARPS - 1;  // the warp that merges; the first WORKERS take units
static_assert(WORKERS >= 1 && WORKERS < WARPS, "a warp is left that merges");
static_assert(WORKERS * SLOTS * TILE_BYTES <= ROOM, "a ring for each worker");

// What is the same in all layers.
struct Step {
  const int* block_tables;
  float softmax_scale;
  int table_stride;
  int num_rows, num_tokens, limit, tiles, units;
  int seen[2], all_see;  // the last key that the lane's columns see, and that all see

  DEVICE Step(const int* cu_q, const int* kv_lens, const int* tables, const int* positions,
              float scale, int stride)
      : block_tables(tables), softmax_scale(scale), table_stride(stride) {
    const int start = load_int(cu_q);
    num_tokens = load_int(cu_q + 1) - start;
    limit = load_int(kv_lens);
    tiles = (limit + KEYS - 1) / KEYS;
    if (num_tokens <= 0 || num_tokens > TOKENS || limit < num_tokens) tiles = num_tokens = 0;
    units = tiles > 0 ? min(count_units(tiles), MAX_UNITS) : 0;
    num_rows = num_tokens * GROUP;
    all_see = limit - 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane_id() % 4 * 2 + c;
      seen[c] = limit - 1;
      if (column < num_rows) seen[c] = min(load_int(positions + start + column / GROUP), limit - 1);
      all_see = min(all_see, seen[c]);
    }
    all_see = __reduce_min_sync(~0u, all_see);
  }
};

DEVICE int state_at(int head, int unit) { return STATES_AT + (head * MAX_UNITS + unit) * (8 * 8); }
DEVICE int sums_at(int head, int unit) {
  return SUMS_AT + (head * MAX_UNITS + unit) * (8 * SIZE * 4);
}

// A unit's state for whoever merges it. num_rows 0: only the other half is cleared.
DEVICE void give_state(const Exchange& x, int num_rows, const State& state, int head, int unit) {
  const int lane = lane_id();
  const float other = __shfl_xor_sync(~0u, state.total[0], 4);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = lane % 4 * 2 + c;
    const bool is_real = row < num_rows;
    const float total = (lane & 4) / 4 == c ? state.total[0] : other;
    if (lane < 4) give_pair(x, state_at(head, unit) + row * 8, state.largest[0][c], total, is_real);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int at = sums_at(head, unit) + (row * SIZE + 16 * i) * 4 + lane / 4 * 8;
      give_pair(x, at, state.sums[0][i][c], state.sums[0][i][c + 2], is_real);
    }
  }
}
// A unit that a warp takes.
struct Work {
  Copier copier;
  u32 ring;
  int head, unit, tile, end;     // tiles
  int copied, slot_in, slot_out;

  DEVICE void start(const Step& s, const Cached* cache, u32 ring_, int task) {
    ring = ring_, head = task % HEADS, unit = task / HEADS;
    tile = unit_start(unit), end = min(unit_start(unit + 1), s.tiles);
    copied = 2 * tile, slot_in = slot_out = 0;
    copier.source = cache + head * (TOKENS_PER_BLOCK * SIZE) + lane_id() / CHUNKS * SIZE +
                    lane_id() % CHUNKS * (16 / KV_TYPE::bytes);
    copier.table = s.block_tables;
    copier.num_entries = (s.limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
    copier.limit = s.limit;
    copier.start(tile, copier.guess(tile, s.table_stride));
  }
  DEVICE void copy_next() {
    if (copied < 2 * end) copier.copy(ring + slot_in * TILE_BYTES, copied / 2, copied % 2);
    commit_copies();
    ++copied;
    slot_in = slot_in + 1 == SLOTS ? 0 : slot_in + 1;
  }
  // The oldest slot.
  DEVICE u32 take() {
    const u32 at = ring + slot_out * TILE_BYTES;
    slot_out = slot_out + 1 == SLOTS ? 0 : slot_out + 1;
    return at;
  }
};

// What other blocks make for a warp's unit in this layer: queries, and of the step's own tokens whose
// keys are in the unit a lane's chunk of keys and values. All of it is asked for at once.
struct Fresh {
  uint4 chunks[TOKENS][2];
  int first_key;  // of the step's own tokens

  DEVICE void take(const Step& s, const Exchange& x, const Work& work, Queries& queries) {
    const int lane = lane_id(), row = lane / 4, head = work.head;
    const u8* from = x.now + Q_AT + ((row / GROUP * HEADS + head) * GROUP + row % GROUP) * (SIZE * 2);
    first_key = s.limit - s.num_tokens;
    u32 pairs[STEPS * 2];
    bool waits;
    do {
      waits = false;
#pragma unroll
      for (int i = 0; i < STEPS * 2; ++i) {
        pairs[i] = ~0u;
        if (row < s.num_rows) pairs[i] = look4(from + query_dimension(i / 2, i % 2) * 2);
      }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int kv = 0; kv < 2; ++kv) {
          chunks[t][kv] = {~0u, ~0u, ~0u, ~0u};
          const int tile = (first_key + t) / KEYS;
          if (t < s.num_tokens && lane < CHUNKS && tile >= work.tile && tile < work.end) {
            chunks[t][kv] = look16(x.now + KV_AT + ((t * 2 + kv) * HEADS + head) * LINE + lane * 16);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < STEPS * 2; ++i) waits |= lacks<2>(pairs[i]);
#pragma unroll
      for (int i = 0; i < TOKENS * 2; ++i) waits |= lacks<KV_BYTES>(chunks[i / 2][i % 2]);
    } while (waits);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      queries.store(0, i, to_inner(~pairs[2 * i]), to_inner(~pairs[2 * i + 1]));
    }
  }
  // Into a slot with keys or values of a tile.
  DEVICE void add_to(u32 slot, const Step& s, int tile, int kv) const {
    const int lane = lane_id();
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const int key = first_key + t - tile * KEYS;
      if (t >= s.num_tokens || key < 0 || key >= KEYS || lane >= CHUNKS) continue;
      const uint4 x = upright_cached(kv ? chunks[t][1] : chunks[t][0]);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slot + place(key, lane)),
                   "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                   : "memory");
    }
    __syncwarp();
  }
};

// Every step copies one half of a tile, keys or values, and takes what was copied SLOTS - 1 steps ago:
// one place for each in the code, for instructions that are far away take time too.
DEVICE void take_unit(const Step& s, const Exchange& x, const Arrivals& arrivals, Work& work,
                      float scale) {
  State state;
  state.clear();
  Queries queries;
  Fresh fresh;
  u32 weights[1][BLOCKS][2];
  const int begin = 2 * work.tile, end = 2 * work.end;
#pragma unroll 1
  for (int step = begin - (SLOTS - 1); step < end; ++step) {
    if (step >= begin) {
      wait_for_copies<SLOTS - 2>();
      __syncwarp();
    }
    work.copy_next();
    if (step < begin) continue;
    if (step == begin) {
      arrivals.wait_in_warp();
      fresh.take(s, x, work, queries);
    }
    const int tile = step / 2;
    const u32 at = work.take();
    fresh.add_to(at, s, tile, step % 2);
    if (step % 2) {
      multiply_values(state.sums, weights, at);
    } else {
      Logits logits;
      multiply_keys(logits, queries, at);
      const int last[1][2] = {{s.seen[0] - tile * KEYS, s.seen[1] - tile * KEYS}};
      soften(state, logits, weights, last, scale, (tile + 1) * KEYS - 1 > s.all_see, step == begin);
    }
  }
  wait_for_copies<0>();
  give_state(x, s.num_rows, state, work.head, work.unit);
}
}  // namespace attention

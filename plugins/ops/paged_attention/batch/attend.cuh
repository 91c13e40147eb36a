// How a warp of batch.cu attends to its part of a context: tiles through its ring, queries, work items.
#pragma once

#include "ops/paged_attention/batch/parts.cuh"
#include "ops/paged_attention/batch/state.cuh"

constexpr long long ENTRY = State::FLOATS * 32;  // floats of a stored work item

struct Call {  // arguments of the kernel
  const MODEL_TYPE::Storage* q;
  const float *k_scale, *v_scale, *out_scale;
  const int* position_ids;
  float softmax_scale;
};

struct Scales {
  float value, quanta;
};

// Attends to tiles [begin, end) of a context. Work items are merged into `merged` or, where find_entry() is not null, stored
// from there on; it is called when tiles are on their way. `page`: the first entries of the table.
template <class Find>
DEVICE Scales attend(const Call& call, Copier& copier, const Context& its, int head, int begin, int end, int page, u32 ring,
                     State& merged, const Find& find_entry) {
  const int lane = threadIdx.x;
  copier.num_entries = (its.limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK, copier.limit = its.limit;
  copier.start(begin, page);
  int copied = 2 * begin;  // keys and values of tiles
  const int to_copy = 2 * end;
  int slot_in = 0, slot_out = 0;
  u32 place_in = ring + Copier::own_place();
  const auto copy_next = [&] {
    if (copied < to_copy) copier.copy(place_in, copied / 2, copied % 2);
    commit_copies();
    ++copied, ++slot_in;
    place_in += TILE_BYTES;
    if (slot_in == SLOTS) slot_in = 0, place_in -= SLOTS * TILE_BYTES;
  };
  const auto arrive = [&] {  // waits for the oldest slot; the slot used before it is free
    wait_for_copies<SLOTS - 2>();
    __syncwarp();
    copy_next();
    const u32 at = ring + slot_out * TILE_BYTES;
    slot_out = slot_out + 1 == SLOTS ? 0 : slot_out + 1;
    return at;
  };
  const int old_tiles = (its.limit - its.num_rows / GROUP) / KEYS;  // may be negative
  int filled = 0;
#pragma unroll 1
  for (; filled < SLOTS - 1 && copied < 2 * old_tiles; ++filled) copy_next();
  const float own_k_scale = K_SCALE ? __ldcg(call.k_scale) : 1.0f;
  const float own_v_scale = V_SCALE ? __ldcg(call.v_scale) : 1.0f;
  const float own_out_scale = STATIC ? __ldcg(call.out_scale) : 1.0f;
  wait_for_dependencies();
#pragma unroll 1
  for (; filled < SLOTS - 1; ++filled) copy_next();

  Queries queries;
  queries.start(ring + SLOTS * TILE_BYTES);
  int seen[COLUMN_BLOCKS][2];  // the last key that a column sees
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
    const int row = 8 * n + lane / 4;
    const int there = min(row, its.num_rows - 1);  // its numbers of all steps lie a fixed number of bytes apart
    const MODEL_TYPE::Storage* from = call.q + ((long long)(its.start + there / GROUP) * HEADS + head) * (GROUP * SIZE) +
                                      there % GROUP * SIZE + query_dimension(0, 0);
    uint2 both[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (IS_BYTE) {
        both[i] = __ldcg((const uint2*)(from + 16 * i));
      } else {
        both[i].x = __ldcg((const u32*)(from + 16 * i));
        both[i].y = __ldcg((const u32*)(from + 16 * i + 8));
      }
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const u32 first = row < its.num_rows ? both[i].x : 0, second = row < its.num_rows ? both[i].y : 0;
      queries.store(n, i, to_inner(first), to_inner(second));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * n + lane % 4 * 2 + c;
      seen[n][c] = its.limit - 1;
      if (column < its.num_rows) {
        seen[n][c] = min(load_int(call.position_ids + its.start + column / GROUP), its.limit - 1);
      }
    }
  }
  int all_see = its.limit - 1;  // keys up to this one are seen by every column
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) all_see = min(all_see, seen[n][c]);
  }
  all_see = __reduce_min_sync(~0u, all_see);

  const float scale = K_SCALE ? __fmul_rn(call.softmax_scale, own_k_scale) : call.softmax_scale;

  float* entry = find_entry();
  State unit;
  bool is_first = true;
  unit.clear();
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    Logits logits;
    multiply_keys(logits, queries, TileKeys(arrive()));
    int last_keys[COLUMN_BLOCKS][2];
#pragma unroll
    for (int n = 0; n < COLUMN_BLOCKS; ++n) {
      last_keys[n][0] = seen[n][0] - tile * KEYS, last_keys[n][1] = seen[n][1] - tile * KEYS;
    }
    u32 weights[COLUMN_BLOCKS][BLOCKS][2];
    soften(unit, logits, weights, last_keys, scale, (tile + 1) * KEYS - 1 > all_see, is_first);
    multiply_values(unit.sums, weights, TileKeys(arrive()));
    is_first = next_unit(tile + 1) == tile + 1 || tile + 1 == end;
    if (!is_first) continue;
    if (entry == nullptr) {
      merged.append(unit);
    } else {
      unit.store(entry);
      entry += ENTRY;
    }
    unit.clear();
  }
  wait_for_copies<0>();
  return {own_v_scale, STATIC ? __fdiv_rn(1.0f, own_out_scale) : 1.0f};
}

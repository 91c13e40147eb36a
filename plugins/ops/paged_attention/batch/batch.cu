// Paged attention of many requests with few tokens each: a warp for each request and KV head.
//
// Computes the same bits as the Triton kernels (triton/state.py says how) and as
// generation.cu. There the 64 rows of a product are mostly empty when every request has one token;
// here keys are the rows of products and the request's COLUMNS query rows their columns, and a warp
// keeps everything except the tiles in registers. Tiles are loaded by asynchronous copies into a ring of
// SLOTS; WARPS to a multiprocessor together keep the memory busy.
//
// A long context is divided into parts of about part_tiles tiles, one warp each. A work item (`unit` in the
// code, see shared/tiles.py) is a range of tiles with its own softmax state. The first part merges its work items;
// every other work item is stored separately, and the warp that finishes last merges all of them, from left
// to right; if all warps run at once (TOGETHER), some wait for all others, and each of these merges a share of the
// dimensions (merge.cuh).
//
// Keys and values are read once and leave L2 first, so that work items are merged before they are written to memory.
//
// Tiles that hold no key of this step are copied before the kernel that writes those has ended: a kernel that writes the
// cache lets others start only after its own wait (WRITES_CACHE in epilogue.cuh), so all before it has ended by then.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads
// for each), SIZE (64 | 128), TOKENS_PER_BLOCK (a power of two), COLUMNS (8 | 16: at least the rows
// of a request), SLOTS, WARPS, QUERY_BYTES (of shared memory; 0: queries stay in registers), UNIT (tiles
// of the first work items), MOST_UNIT (of the last ones), TOGETHER, K_SCALE, V_SCALE, STATIC.
// Grid: parts, KV heads, requests. One warp per block.

#include "ops/paged_attention/batch/merge.cuh"

DEVICE int next_unit(int tile) {  // the first tile, from this one on, that starts a work item
  const int size = tile < 16 ? 1 : min(1 << (highest_bit(tile) - 3), MOST_UNIT);
  return (tile + size - 1) & -size;
}

// Tiles of a part where the warps of the launch share a context: whole work items.
DEVICE int share_of_tiles(int tiles) {
  const int most = (tiles + int(gridDim.x) - 1) / int(gridDim.x);
  return max((most + MOST_UNIT - 1) & -MOST_UNIT, MOST_UNIT);
}

// Two dimensions of block i of a row.
DEVICE void store_apart(OUT_TYPE::Storage* row, int i, u32 pair) {
  OUT_TYPE::Storage* to = row + value_dimension(i, 0);
  const int bits = 8 * OUT_TYPE::bytes;
  to[0] = OUT_TYPE::Storage(pair & ((1u << bits) - 1));
  to[value_dimension(i, 1) - value_dimension(i, 0)] = OUT_TYPE::Storage(pair >> bits);
}

extern "C" __global__ void __launch_bounds__(32, WARPS)
    batch(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
          const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
          const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
          float* partial, int* counters, float softmax_scale, int table_stride, int part_tiles,
          int max_entries) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const u32 ring = shared_address(memory);
  const int head = blockIdx.y, request = blockIdx.z, lane = threadIdx.x;
  Copier copier;
  copier.source = cache + head * (TOKENS_PER_BLOCK * SIZE) + lane / CHUNKS * SIZE +
                  lane % CHUNKS * (16 / KV_TYPE::bytes);
  copier.table = block_tables + (long long)request * table_stride;
  // What tiles cannot be asked for without is loaded at once, and nothing else before they are.
  int begin = next_unit(blockIdx.x * part_tiles);
  int page = copier.guess(begin, table_stride);
  const int limit = load_int_now(kv_lens + request), start = load_int_now(cu_q + request);
  const int num_rows = (load_int_now(cu_q + request + 1) - start) * GROUP;
  const int tiles = (limit + KEYS - 1) / KEYS;
  if (TOGETHER) {  // as many parts as there are warps, however much shorter than the longest a context is
    const int fewer = part_tiles > MOST_UNIT ? (part_tiles - MOST_UNIT) * int(gridDim.x) : 0;
    if (tiles <= fewer || tiles > part_tiles * int(gridDim.x) || part_tiles % MOST_UNIT) {
      part_tiles = share_of_tiles(tiles);
      begin = next_unit(blockIdx.x * part_tiles);
      page = copier.guess(begin, table_stride);
    }
  }
  if (num_rows <= 0 || num_rows > COLUMNS || int(blockIdx.x) * part_tiles >= tiles) {
    wait_for_dependencies();
    return;
  }
  const int end = min(next_unit(min((int(blockIdx.x) + 1) * part_tiles, tiles)), tiles);

  copier.num_entries = (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK, copier.limit = limit;
  copier.start(begin, page);
  int copied = 2 * begin;  // keys and values of tiles
  int slot_in = 0, slot_out = 0;
  u32 place_in = ring + Copier::own_place();
  const auto copy_next = [&] {
    if (copied < 2 * end) copier.copy(place_in, copied / 2, copied % 2);
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
  const int old_tiles = (limit - num_rows / GROUP) / KEYS;  // may be negative
  int filled = 0;
#pragma unroll 1
  for (; filled < SLOTS - 1 && copied < 2 * old_tiles; ++filled) copy_next();
  const float own_k_scale = K_SCALE ? __ldcg(k_scale) : 1.0f;
  const float value_scale = V_SCALE ? __ldcg(v_scale) : 1.0f;
  const float own_out_scale = STATIC ? __ldcg(out_scale) : 1.0f;
  wait_for_dependencies();
#pragma unroll 1
  for (; filled < SLOTS - 1; ++filled) copy_next();

  Queries queries;
  queries.start(ring + SLOTS * TILE_BYTES);
  int seen[COLUMN_BLOCKS][2];  // the last key that a column sees
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
    const int row = 8 * n + lane / 4;
    const int there = min(row, num_rows - 1);  // its numbers of all steps lie a fixed number of bytes apart
    const MODEL_TYPE::Storage* from = q + ((long long)(start + there / GROUP) * HEADS + head) * (GROUP * SIZE) +
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
      const u32 first = row < num_rows ? both[i].x : 0, second = row < num_rows ? both[i].y : 0;
      queries.store(n, i, to_inner(first), to_inner(second));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * n + lane % 4 * 2 + c;
      seen[n][c] = limit - 1;
      if (column < num_rows) {
        seen[n][c] = min(load_int(position_ids + start + column / GROUP), limit - 1);
      }
    }
  }
  int all_see = limit - 1;  // keys up to this one are seen by every column
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) all_see = min(all_see, seen[n][c]);
  }
  all_see = __reduce_min_sync(~0u, all_see);
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, own_k_scale) : softmax_scale;

  const long long entry_floats = State::FLOATS * 32;
  float* entries = partial + (request * HEADS + head) * (max_entries * entry_floats);
  const int first_end = min(next_unit(part_tiles), tiles);  // where the first part ends
  int entry = 1 + count_units(max(min(begin, tiles), first_end)) - count_units(first_end);
  const int num_parts = (tiles + part_tiles - 1) / part_tiles;
  const int count = 1 + count_units(tiles) - count_units(first_end);  // entries
  State merged, unit;
  merged.clear();
  bool is_first = true;
  unit.clear();
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    Logits logits;
    multiply_keys(logits, queries, TileKeys(arrive()));
    int last[COLUMN_BLOCKS][2];
#pragma unroll
    for (int n = 0; n < COLUMN_BLOCKS; ++n) {
      last[n][0] = seen[n][0] - tile * KEYS, last[n][1] = seen[n][1] - tile * KEYS;
    }
    u32 weights[COLUMN_BLOCKS][BLOCKS][2];
    soften(unit, logits, weights, last, scale, (tile + 1) * KEYS - 1 > all_see, is_first);
    multiply_values(unit.sums, weights, TileKeys(arrive()));
    is_first = next_unit(tile + 1) == tile + 1 || tile + 1 == end;
    if (!is_first) continue;
    if (blockIdx.x == 0) {
      merged.append(unit);
    } else {
      unit.store(entries + entry++ * entry_floats);
    }
    unit.clear();
  }
  wait_for_copies<0>();
  const float quanta = STATIC ? __fdiv_rn(1.0f, own_out_scale) : 1.0f;
  if (num_parts > 1) {
    if (blockIdx.x == 0) merged.store(entries);
    const int group = request * HEADS + head;
    if (TOGETHER) {
      int* counter = counters + group * 32;  // one cache line each
      const int each = lines_of_merger(num_parts), mergers = (SUM_LINES + each - 1) / each;
      arrive_at(counter);
      if (int(blockIdx.x) >= mergers) return;  // the next kernel's tiles take its place
      wait_for_parts(counter, num_parts);
      if (each == 1) {
        merge_lines<1>(entries, entry_floats, count, blockIdx.x, each, num_rows, head, start, out,
                       value_scale, quanta, ring);
      } else {
        merge_lines<4>(entries, entry_floats, count, blockIdx.x, each, num_rows, head, start, out,
                       value_scale, quanta, ring);
      }
      leave_parts(counter, num_parts, mergers);
      return;
    }
    if (arrive_at(counters + group) != num_parts - 1) return;
    if (lane == 0) counters[group] = 0;
    merge_alone(merged, entries, count, ring);
  }
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
    const float other = __shfl_xor_sync(~0u, merged.total[n], 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + lane % 4 * 2 + c;
      const float total = (lane & 4) / 4 == c ? merged.total[n] : other;
      const float factor = __fdiv_rn(value_scale, total);
      if (row >= num_rows) continue;
      const long long token = start + row / GROUP;
      OUT_TYPE::Storage* to = out + (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const float(&sums)[4] = merged.sums[n][i];
        store_apart(to, i, finish_pair(sums[c], sums[c + 2], factor, quanta));
      }
    }
  }
}

// Paged attention of many requests with few tokens each: one warp per request and KV head.
//
// Computes the same bits as the Triton kernels (triton/state.py says how) and as generation.cu. There the 64 rows of a
// product are mostly empty if every request has one token; here keys are the rows (M) of products, the request's query
// rows are their COLUMNS columns (N), and a warp keeps everything except the tiles in registers. Tiles are loaded by
// asynchronous copies into a ring of SLOTS; the WARPS warps of a multiprocessor together saturate the memory.
//
// A long context is divided into parts, one warp each. A work item (`unit` in the code, see shared/tiles.py) is a range of
// tiles with its own softmax state. The first part merges its work items; every other work item is stored separately, and
// all of them are merged from left to right. Three kinds of binaries do that:
// - neither TOGETHER nor SEVERAL: contexts are not divided, or into parts of part_tiles tiles. The warp that finishes last
//   merges.
// - TOGETHER: all warps run concurrently, equally many for each of a few contexts. Some wait for all others of the
//   context, and each of these merges a share of the dimensions (merge.cuh).
// - TOGETHER and SEVERAL: the warps are divided among the contexts of all requests by their lengths in this step
//   (parts.cuh).
//
// Keys and values are read once and marked to leave L2 first, so that work items are merged before they are evicted to
// memory.
//
// Tiles that hold no key of this step are copied before the kernel that writes this step's keys has ended: a kernel that
// writes the cache lets others start only after its own wait (WRITES_CACHE in epilogue.cuh), so by then everything before
// it has ended.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (KV heads), GROUP (query heads per KV head), SIZE
// (64 | 128), TOKENS_PER_BLOCK (a power of two), COLUMNS (8 | 16: at least the rows of a request), SLOTS, WARPS,
// QUERY_BYTES (of shared memory; 0: queries stay in registers), UNIT (tiles of the first work items), MOST_UNIT (of the
// last ones), TOGETHER, SEVERAL, KEPT_BYTES, K_SCALE, V_SCALE, STATIC.
// Grid: parts, KV heads, requests; SEVERAL: warps, KV heads. One warp per block.

#include "ops/paged_attention/batch/attend.cuh"
#include "ops/paged_attention/batch/merge.cuh"

// Two dimensions of block i of a row.
DEVICE void store_apart(OUT_TYPE::Storage* row, int i, u32 pair) {
  OUT_TYPE::Storage* to = row + value_dimension(i, 0);
  const int bits = 8 * OUT_TYPE::bytes;
  to[0] = OUT_TYPE::Storage(pair & ((1u << bits) - 1));
  to[value_dimension(i, 1) - value_dimension(i, 0)] = OUT_TYPE::Storage(pair >> bits);
}

// Stores what has been merged of a request's context.
DEVICE void finish(const State& merged, const Context& its, int head, OUT_TYPE::Storage* out, float value_scale,
                   float quanta) {
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < COLUMN_BLOCKS; ++n) {
    const float other = __shfl_xor_sync(~0u, merged.total[n], 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + lane % 4 * 2 + c;
      const float total = (lane & 4) / 4 == c ? merged.total[n] : other;
      const float factor = __fdiv_rn(value_scale, total);
      if (row >= its.num_rows) continue;
      const long long token = its.start + row / GROUP;
      OUT_TYPE::Storage* to = out + (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const float(&sums)[4] = merged.sums[n][i];
        store_apart(to, i, finish_pair(sums[c], sums[c + 2], factor, quanta));
      }
    }
  }
}

// What a warp keeps in shared memory while it attends: there are few registers.
struct Kept {
  Share share;
  Part part;
  Context its;
};
static_assert(sizeof(Kept) <= KEPT_BYTES, "room for it");

extern "C" __global__ void __launch_bounds__(32, WARPS)
    batch(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
          const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
          const int* position_ids, const int* cu_q, const int* kv_lens, const int* block_tables,
          float* partial, int* counters, float softmax_scale, int table_stride, int requests, int parts,
          int part_tiles, int grain, int room) {
  extern __shared__ __align__(1024) u8 memory[];
  launch_dependents();
  const u32 ring = shared_address(memory);
  const int head = blockIdx.y, lane = threadIdx.x;
  const Call call = {q, k_scale, v_scale, out_scale, position_ids, softmax_scale};
  Copier copier;
  copier.source = cache + head * (TOKENS_PER_BLOCK * SIZE) + lane / CHUNKS * SIZE +
                  lane % CHUNKS * (16 / KV_TYPE::bytes);
  // What tiles cannot be asked for without is loaded at once, and nothing else before they are.
  Share share;
  Part part;
  share.grain = grain, share.from = -1, share.entries = 0, share.request = blockIdx.z;
  part.nth = blockIdx.x;
  if (SEVERAL) {  // as if all contexts were as long as they may be
    share.request = parts > 0 ? min(int(blockIdx.x) / parts, requests - 1) : 0;
    part.nth = int(blockIdx.x) - share.request * parts;
  }
  part.begin = TOGETHER ? part.nth * part_tiles : next_unit(part.nth * part_tiles);
  copier.table = block_tables + (long long)share.request * table_stride;
  int page = copier.guess(part.begin, table_stride);
  Context its;
  its.load(kv_lens, cu_q, share.request);
  const bool is_even = !SEVERAL || share.is_even(kv_lens, cu_q, requests, parts, part_tiles, room, ring);
  if (is_even) {
    if (TOGETHER && !share.fits(its.tiles, parts, part_tiles)) {
      part_tiles = max(share.padded((its.tiles + parts - 1) / parts), grain), part.begin = part.nth * part_tiles;
      page = copier.guess(part.begin, table_stride);
    }
    if (part.nth * part_tiles >= its.tiles) {
      wait_for_dependencies();
      return;
    }
    part.end = TOGETHER ? part.begin + part_tiles : next_unit((part.nth + 1) * part_tiles);
    part.end = min(part.end, its.tiles), part.owner = int(blockIdx.x) - part.nth;
    part.entries = SEVERAL ? share.request * share.entries : 0;
  } else {
    if (!share.find(requests, room, ring)) {
      wait_for_dependencies();
      return;
    }
    its.load(kv_lens, cu_q, share.request);
    part.find(share, its);
    copier.table = block_tables + (long long)share.request * table_stride;
    page = copier.guess(part.begin, table_stride);
  }

  if (SEVERAL) {
    partial += head * (long long)room * ENTRY, counters += head * gridDim.x * 32;  // a cache line each
  } else {
    partial += (blockIdx.z * HEADS + head) * (long long)room * ENTRY;
    counters += (blockIdx.z * HEADS + head) * (TOGETHER ? gridDim.x * 32 : 1);
  }
  Kept* kept = (Kept*)(memory + SLOTS * TILE_BYTES + QUERY_BYTES);
#pragma unroll 1
  while (true) {
    State merged;
    merged.clear();
    if (SEVERAL && !is_even && part.nth > 0 && part.mergers == 0) {  // goes on where another warp has stopped
      wait_for_dependencies();
      wait_for_parts(counters + part.owner * 32, 1, -1);
      merged.load(partial + part.entries * ENTRY);
    }
    const auto find_entry = [&]() -> float* {
      if (is_even) part.first_end = TOGETHER ? min(part_tiles, its.tiles) : min(next_unit(part_tiles), its.tiles);
      if (part.nth == 0 || !(is_even || part.mergers > 0)) return nullptr;
      return partial + (part.entries + 1 + count_units(part.begin) - count_units(part.first_end)) * ENTRY;
    };
    __syncwarp();
    if (SEVERAL && lane == 0) *kept = {share, part, its};
    const Scales scales = attend(call, copier, its, head, part.begin, part.end, page, ring, merged, find_entry);
    if (SEVERAL) {
      __syncwarp();
      share = kept->share, part = kept->part, its = kept->its;
    }
    if (is_even) {
      part.first_end = TOGETHER ? min(part_tiles, its.tiles) : min(next_unit(part_tiles), its.tiles);
      part.count = (its.tiles + part_tiles - 1) / part_tiles, part.mergers = part.count;
    }
    int* counter = counters + (TOGETHER ? part.owner * 32 : 0);
    float* entries = partial + part.entries * ENTRY;
    const int count = 1 + count_units(its.tiles) - count_units(part.first_end);
    const bool drops = SEVERAL ? share.drops : count * requests * HEADS > FEW_ENTRIES;
    bool is_done = part.count == 1;
    if (part.count > 1 && (!TOGETHER || (SEVERAL && parts < FEW_PARTS && part.count < 8 && part.mergers > 0))) {
      if (part.nth == 0) merged.store(entries);
      is_done = arrive_at(counter) == part.count - 1;  // the last one merges
      if (is_done) {
        if (lane == 0) *counter = 0;
        merge_alone(merged, entries, count, ring, drops);
      }
      part.count = 1;
    }
    if (part.count == 1 || (part.mergers == 0 && part.nth == 1)) {
      if (is_done || part.count > 1) finish(merged, its, head, out, scales.value, scales.quanta);
      if (SEVERAL && part.count > 1 && lane == 0) *counter = 0;
    } else if (TOGETHER) {
      if (part.nth == 0) merged.store(entries);
      const int before = arrive_at(counter), each = lines_of_merger(max(part.mergers, 1));
      const int mergers = (SUM_LINES + each - 1) / each;
      if (part.mergers > 0 && (is_even || share.from < 0)) {
        if (part.nth >= mergers) return;  // the next kernel's tiles take its place
        wait_for_parts(counter, part.count, before);
        const int left = leave_parts(counter);
        if (each == 1) {
          merge_lines<1>(entries, ENTRY, count, part.nth, each, its.num_rows, head, its.start, out, scales.value,
                         scales.quanta, ring, drops);
        } else {
          merge_lines<4>(entries, ENTRY, count, part.nth, each, its.num_rows, head, its.start, out, scales.value,
                         scales.quanta, ring, drops);
        }
        clear_counter(counter, left, part.count + mergers);
        return;
      }
    }
    if (!SEVERAL || is_even || !share.next(its, kv_lens, cu_q, requests)) return;
    part.find(share, its);
    copier.table = block_tables + (long long)share.request * table_stride;
    page = copier.guess(part.begin, table_stride);
  }
}

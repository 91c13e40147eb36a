// Attention of one request as layers.cu computes it, layer after layer, without the products between: the first thread
// block gives what QKV would, and copies out what the output projection would read.
constexpr int MXFP4_TABLE_BYTES = 128;  // emulated_warps.py leaves mxfp4.cuh out
#include "fused/decoder_layers/copy_tiles.cuh"

constexpr int GIVEN_BYTES = ATTENDED_AT;            // of a layer: queries, keys, values, as they are exchanged
constexpr int ATTENDED_BYTES = TOKENS * ATTENDED;
constexpr u8 UNTOUCHED = 0xA5;                      // what shared memory holds at the start

#if MAX_UNITS > 32
#define CACHE_MAP , const TensorMap cache_map, const Cached* all_cached
#else
#define CACHE_MAP
#endif
// `touched`, one for each block: bytes of shared memory outside of the tiles' slots that are not as they were.
extern "C" __global__ void attend_layers(const long long* table, int num_layers, const u8* given, u8* attended,
                                         const int* positions, const int* cu_q, const int* kv_lens,
                                         const int* block_tables, u8* exchanged, int* counters, int* touched,
                                         float softmax_scale, int table_stride CACHE_MAP) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared shared(shared_address(memory));
#if MAX_UNITS > 32
  if (threadIdx.x == 0) {
    for (int i = 0; i < CHUNKS * STAGES; ++i) barrier_init(shared.full + 8 * i, 1);
    for (int i = 0; i < STAGES; ++i) barrier_init(shared.empty + 8 * i, 4);
  }
  __syncthreads();
  u32 number = 0;  // of a ring that has nothing else
  if (threadIdx.x >= COMPUTE) {
    Tiles tiles(&cache_map, cu_q, kv_lens, block_tables, (threadIdx.x - COMPUTE) / 32);
    for (int l = 0; l < num_layers; ++l) {
      const u64 ahead = u64(((const Layer*)table + l)->cache) - u64(all_cached);
      tiles.copy_layer(shared, ahead / Tiles::ROW, number, 0);
    }
    return;
  }
#endif
  const attention::Step step(cu_q, kv_lens, block_tables, positions, softmax_scale, table_stride);
  Exchange x;
  x.start(exchanged, 0);
  Arrivals arrivals = {counters + 32, 0};
  int heads_expected = 0;
  const bool is_first = blockIdx.x == 0;
  // Of the layer before. All blocks have merged it, so nobody reads its queries and keys any more.
  const auto copy_out = [&](int layer) {
    if (threadIdx.x == 0) Arrivals::ask(arrivals.counter, arrivals.expected);
    meet();
    for (int i = 4 * threadIdx.x; i < ATTENDED_BYTES; i += 4 * COMPUTE) {
      u32 values;  // which are not yet there because their blocks have been counted
      do values = look4(x.now + x.other + ATTENDED_AT + i);
      while (gaps<1>(values));
      *(u32*)(attended + layer * ATTENDED_BYTES + i) = values;
    }
    meet();  // before the first arrival of a layer, which lets others clear them
  };
  for (int l = 0; l < num_layers; ++l) {
    if (is_first) {
      if (l > 0) copy_out(l - 1);
      if (threadIdx.x == 0) Arrivals::add(arrivals.counter);
      for (int i = threadIdx.x; i < GIVEN_BYTES; i += COMPUTE) x.now[i] = given[l * GIVEN_BYTES + i];
      meet();
      if (threadIdx.x == 0) Arrivals::add(arrivals.counter);
      for (int i = threadIdx.x; i < GIVEN_BYTES; i += COMPUTE) x.now[x.other + i] = 0;
    }
    if (threadIdx.x == 0) Arrivals::ask(arrivals.counter, arrivals.expected + 1);  // who merges clears what is copied out
    meet();
    arrivals.expected += 2;
#if MAX_UNITS > 32
    attention::attend_long(step, x, (const Layer*)table + l, shared, arrivals, counters + 64, heads_expected, l, number);
#else
    attention::attend(step, x, (const Layer*)table + l, shared, arrivals, counters + 64, heads_expected, l, [] {});
#endif
    x.turn();
  }
  if (is_first) copy_out(num_layers - 1);
  if (threadIdx.x == 0) {
    const u32 tokens = shared.tokens - shared.base, first = IS_LONG ? shared.ring - shared.base : tokens;
    const u32 end = tokens + (IS_LONG ? ROOM : attention::TILES_BYTES);
    int count = 0;
    for (u32 i = 0; i < SHARED_BYTES; ++i) count += (i < first || i >= end) && memory[i] != UNTOUCHED;
    touched[blockIdx.x] = count;
  }
}

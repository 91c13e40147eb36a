// All decoder layers for one or two tokens in one kernel: the time of a step is that of reading the weights.
//
// One thread block per multiprocessor. Four warps (two for 4-bit weights) copy this block's share of all weights,
// product after product, through a ring of STAGES units (copy.cuh); they never wait for another block, so the next
// weights arrive while results are exchanged and while attention runs. With 4-bit weights the third prefetches and
// the fourth may fetch other blocks' results (fetch.cuh).
// Eight warps compute: each product reads its tokens as other blocks finish them (exchange.cuh) and
// multiplies what the ring holds (product.cuh); attend.cuh has the attention between products. Four more warps
// may hold some units of gate and up if the ring is too small for what could be loaded meanwhile (hold.cuh).
//
// A binary for contexts longer than 4,096 tokens (MAX_UNITS) has keys and values come through the ring, too:
// attend_long.cuh, copy_tiles.cuh.
//
// Every result has the same bits as the kernels of the single operators give: the same intervals of K in
// the same order, the same norm, epilogues, attention work items and merges.
//
// All blocks must run at the same time, because they wait for each other. `counters`, one cache line each:
// blocks that have ended (and, next to it, which exchange buffer comes first), arrivals, arrivals for each KV
// head. All except the buffer index are zero before and after.
//
// Macros: MXFP4 (0 | 1: 4-bit weights), MODEL_TYPE, KV_TYPE, HIDDEN, INTERMEDIATE, NUM_HEADS,
// NUM_KV_HEADS, HEAD_SIZE, O_GROUP and DOWN_GROUP (weight rows that a block processes at once: 8 | 16),
// TOKENS_PER_BLOCK, TOKENS (the most of a step), NUM_BLOCKS (of the grid), STAGES, IN_FLIGHT_SMALL,
// IN_FLIGHT_AHEAD, IN_FLIGHT, EARLY_QKV and HELD (tactics.py), ROOM (of shared memory: chain.cuh), SLOTS
// (tiles in shared memory per team of four warps that computes attention: 1 | 2), MAX_UNITS (attention work
// items), EXCHANGE_BYTES.

#include "fused/decoder_layers/attend.cuh"
#include "fused/decoder_layers/copy_tiles.cuh"
#include "fused/decoder_layers/fetch.cuh"
#include "fused/decoder_layers/hold.cuh"
#include "fused/decoder_layers/prefetch.cuh"
#include "fused/decoder_layers/rotated.cuh"

DEVICE Value finish_plain(const PlainEnd::Epilogue& e, const PlainEnd::Rows& rows,
                          const PlainEnd::Token& t, int half, float sum) {
  return half ? plain_end::finish_one(e, rows, t, 1, sum) : plain_end::finish_one(e, rows, t, 0, sum);
}

// The index in [TOKENS, HIDDEN] of a result's r-th row.
template <class S>
DEVICE int hidden_place(const Item<S>& item, int r) {
  return item.token * HIDDEN + item.row() + 8 * r;
}
DEVICE int activated_at(const Item<GateUpSize>& item) {
  return ACTIVATED_AT + item.token * INTERMEDIATE + 8 * item.group + threadIdx.x % 32 / 4;
}

// A thread's field of a layer, read a layer ahead, so that nothing waits for an address.
DEVICE u64 load_field(const Layer* layer) {
  return threadIdx.x < sizeof(Layer) / 8 ? __ldg((const u64*)layer + threadIdx.x) : 0;
}
DEVICE void keep_field(const Shared& shared, int half, u64 field) {
  if (threadIdx.x >= sizeof(Layer) / 8) return;
  const u32 to = shared.layers + half * sizeof(Layer) + threadIdx.x * 8;
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(field) : "memory");
}

template <int COUNT, bool ARE_MORE>  // ARE_MORE: more than a thread had at the start
DEVICE void take_registers() {
  if (ARE_MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A step of two tokens may have one and padding, which only the device knows: then the launch of one token computes it,
// and that of two nothing, or the other way round. Whoever computes nothing waits for the launch before all the same, for
// the next one waits for this one alone.
DEVICE bool is_for_this_launch(const int* cu_q) {
  wait_for_dependencies();
  const bool is_one = attention::load_int(cu_q + 1) - attention::load_int(cu_q) == 1;
  return is_one == (TOKENS == 1);
}

#if MAX_UNITS > 32  // the whole cache, in boxes of a head's keys or values of a page or of a tile
#define CACHE_MAP , const __grid_constant__ TensorMap cache_map, const Cached* all_cached
#else
#define CACHE_MAP
#endif
extern "C" __global__ void __launch_bounds__(COMPUTE + COPY + HOLD, 1)
    layers(const long long* table, int num_layers, int tokens, const u8* x, const uint4* residual,
           Value* down_out, uint4* residual_out, const int* rows, int is_gathered, const float* rotary,
           const int* positions, const int* slots, const int* cu_q, const int* kv_lens,
           const int* block_tables, u8* exchanged, int* counters, float epsilon, float softmax_scale,
           int table_stride, int is_one_of_two CACHE_MAP) {
  extern __shared__ u8 memory[];
  // Ahead of everything: what a copy brings must have arrived before the block ends.
  if (is_one_of_two && !is_for_this_launch(cu_q)) return;
  const Shared shared(shared_address(memory));
  const Layer* all = (const Layer*)table;
  if (MXFP4) make_mxfp4_table(shared.table);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      for (int c = 0; c < CHUNKS; ++c) barrier_init(shared.full + 8 * (CHUNKS * i + c), 1);
      barrier_init(shared.empty + 8 * i, 4);
    }
    barrier_init(shared.room, WARPS), barrier_init(shared.came, 1);
    for (int i = 0; i < attention::TEAMS; ++i) barrier_init(shared.came_queries + 8 * i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
#if HELD > 0
  if (threadIdx.x >= COMPUTE + COPY) {
    take_registers<HOLD_REGISTERS, (HOLD_REGISTERS > 128)>();
    hold_all(shared, num_layers);
    return;
  }
#endif
  if (threadIdx.x >= COMPUTE) {  // leave registers to the warps that compute
    take_registers<COPY_REGISTERS, false>();
    const int chunk = (threadIdx.x - COMPUTE) / 32;
    if (IS_PREFETCHED_BY_A_WARP && chunk == CHUNKS) prefetch_layers(all, num_layers);
#if MAX_UNITS > 32
    else copy_all_long(shared, all, num_layers, chunk, &cache_map, all_cached, cu_q, kv_lens, block_tables);
#else
    else if (lane_id() == 0 && chunk < CHUNKS) copy_all(shared, all, num_layers, chunk);
    else if (IS_FETCHED && lane_id() == 0) fetch_all(shared, exchanged, counters, num_layers, cu_q, kv_lens);
#endif
    return;
  }
  take_registers<COMPUTE_REGISTERS, true>();
  wait_for_dependencies();
  const attention::Step step(cu_q, kv_lens, block_tables, positions, softmax_scale, table_stride);
  Exchange exchange;
  exchange.start(exchanged, __ldcg(counters + 1));
  Residual kept(residual, tokens);
  Arrivals arrivals = {counters + 32, 0};
  int heads_expected = 0;
  u32 taken = 0;
  keep_field(shared, 0, load_field(all));
  // Padding has no results. With `is_gathered` only the token of the only row of logits has a row of what comes out.
  if (TOKENS > 1) tokens = min(tokens, attention::load_int(cu_q + 1) - attention::load_int(cu_q));
  const int only = TOKENS > 1 && is_gathered ? attention::load_int(rows) : -1;
  const auto out_row = [&](int token) { return only < 0 ? token : token == only ? 0 : -1; };
  meet();
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l) {
    const Layer* layer = (const Layer*)(memory + (shared.layers - shared.base)) + l % 2;
    const bool is_last = l == num_layers - 1;
    const auto load_next = [&] { return load_field(all + (is_last ? l : l + 1)); };
    u64 next_field = MXFP4 ? 0 : load_next();
    {
      const Weights& w = layer->qkv;
      const RopeEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, ATTENDED,
                                   rotary, positions, slots, layer->cache, layer->k_scale,
                                   layer->v_scale, TOKENS_PER_BLOCK};
      CachedPair fresh = {nullptr};
      const auto bring = [&](bool, const RopeEnd::Token& t) {
        const auto meanwhile = [&] { fresh.divisor = Divisor(t.kv_scale); };
        if (l == 0) {
          bring_tokens<QkvSize, false>(shared, arrivals, x, tokens);
          meanwhile();
        } else {
          Norm norm(layer->qkv_norm, w.x_scale);
          const u8* delta = exchange.now + exchange.other + DOWN_AT;  // of the previous layer
          norm.bring<QkvSize, EARLY_QKV>(shared, arrivals, delta, (l + 1) % 2, kept, nullptr, out_row,
                                         epsilon, tokens, meanwhile);
        }
      };
      const auto finish = [&](const Item<QkvSize>& item, const RopeEnd::Rows& rows,
                              const RopeEnd::Token& t, const float (&sum)[2]) {
        const rope_end::Rotated y = rope_end::finish_pair(e, rows, t, item.group, sum[0], sum[1]);
        fresh.give(exchange, t, y, item.token);
      };
      const auto clear_places = [&](const Item<QkvSize>& item) {
        const rope_end::Rotated y = rope_end::place_of(item.group);
        const RotatedPlace place(y.head, y.dim, y.apart, item.token);
        for (int i = 0; i < 2; ++i) {
          if (place.is_query) clear<2>(exchange, place.at + i * place.apart);
          else clear<KV_BYTES>(exchange, place.at + i * place.apart);
        }
        if (fresh.to) fresh.to[0] = fresh.left, fresh.to[y.apart] = fresh.right;
      };
      Expanded first = {};
      product<QkvSize, RopeEnd>(shared, arrivals, tokens, taken, e, first, bring, finish, clear_places);
    }
    meet();  // keys and values are written where tokens and sums were
    if (HELD > 0) holders_arrive<QKV_IS_DONE>();
    Expanded first_of_o = {};
#if MAX_UNITS > 32
    attention::attend_long(step, exchange, layer, shared, arrivals, counters + 64, heads_expected, l, taken);
#else
    attention::attend(step, exchange, layer, shared, arrivals, counters + 64, heads_expected, l,
                      [&] { expand_first<OSize>(shared, taken, first_of_o); });
#endif
    {
      const Weights& w = layer->o;
      const PlainEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, HIDDEN};
      const auto bring = [&](bool has_part, const PlainEnd::Token&) {
        const u8* from = exchange.now + ATTENDED_AT;
        if (has_part) bring_tokens<OSize, true>(shared, arrivals, from, tokens);
      };
      const auto finish = [&](const Item<OSize>& item, const PlainEnd::Rows& rows,
                              const PlainEnd::Token& t, const float (&sum)[Item<OSize>::ROWS]) {
#pragma unroll
        for (int r = 0; r < Item<OSize>::ROWS; ++r) {
          const Value y = finish_plain(e, rows, t, item.half(r), sum[r]);
          give(exchange, O_AT + hidden_place(item, r) * 2, y);
        }
      };
      const auto clear_places = [&](const Item<OSize>& item) {
#pragma unroll
        for (int r = 0; r < Item<OSize>::ROWS; ++r) {
          clear<2>(exchange, O_AT + hidden_place(item, r) * 2);
        }
      };
      product<OSize, PlainEnd, true>(shared, arrivals, tokens, taken, e, first_of_o, bring, finish, clear_places);
    }
    if (MXFP4) next_field = load_next();  // later: it takes registers
    {
      const Weights& w = layer->gate_up;
      const SwigluEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens,
                                     INTERMEDIATE, layer->activated_scale};
      const auto bring = [&](bool, const SwigluEnd::Token&) {
        Norm norm(layer->mlp_norm, w.x_scale);
        uint4* also = is_last && blockIdx.x == 0 ? residual_out : nullptr;
        norm.bring<GateUpSize, EARLY>(shared, arrivals, exchange.now + O_AT, l % 2, kept, also, out_row,
                                      epsilon, tokens, [] {});
      };
      const auto finish = [&](const Item<GateUpSize>& item, const SwigluEnd::Rows& rows,
                              const SwigluEnd::Token& t, const float (&sum)[2]) {
        give(exchange, activated_at(item), swiglu_end::finish_pair(e, rows, t, sum[0], sum[1]));
      };
      const auto clear_places = [&](const Item<GateUpSize>& item) {
        clear<1>(exchange, activated_at(item));
      };
      Expanded first = {};
      product<GateUpSize, SwigluEnd>(shared, arrivals, tokens, taken, e, first, bring, finish, clear_places);
    }
    keep_field(shared, (l + 1) % 2, next_field);
    if (!IS_PREFETCHED_BY_A_WARP) prefetch_field(next_field);
    {
      const Weights& w = layer->down;
      const PlainEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, HIDDEN};
      const auto bring = [&](bool has_part, const PlainEnd::Token&) {
        const u8* from = exchange.now + ACTIVATED_AT;
        if (has_part || IS_FETCHED) {
          bring_tokens<DownSize, true, IS_FETCHED>(shared, arrivals, from, tokens, (l + 1) % 2);
        }
      };
      const auto finish = [&](const Item<DownSize>& item, const PlainEnd::Rows& rows,
                              const PlainEnd::Token& t,
                              const float (&sum)[Item<DownSize>::ROWS]) {
#pragma unroll
        for (int r = 0; r < Item<DownSize>::ROWS; ++r) {
          const Value y = finish_plain(e, rows, t, item.half(r), sum[r]);
          const int place = hidden_place(item, r), to = out_row(item.token);
          if (!is_last) give(exchange, DOWN_AT + place * 2, y);
          else if (to >= 0) down_out[place + (to - item.token) * HIDDEN] = y;
        }
      };
      const auto clear_places = [&](const Item<DownSize>& item) {
#pragma unroll
        for (int r = 0; r < Item<DownSize>::ROWS; ++r) {
          clear<2>(exchange, DOWN_AT + hidden_place(item, r) * 2);
        }
      };
      Expanded first = {};
      product<DownSize, PlainEnd>(shared, arrivals, tokens, taken, e, first, bring, finish, clear_places);
    }
    exchange.turn();
  }
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counters)
                 : "memory");
    if (before == NUM_BLOCKS - 1) {
      counters[0] = 0, counters[1] = (__ldcg(counters + 1) + num_layers) & 1;
      for (int i = 1; i < 2 + NUM_KV_HEADS; ++i) counters[32 * i] = 0;
    }
  }
}

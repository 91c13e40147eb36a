// Decoder layers for a token or two, in one kernel: the time of a step is that of reading the weights.
//
// One thread block a multiprocessor. Four warps (two, for weights of four bits) copy this block's share
// of all weights, product after product, through a ring of STAGES units (copy.cuh); they never wait for
// another block, so while numbers are handed on and while attention runs, weights of what follows arrive.
// Eight warps compute: each product takes its tokens as other blocks finish them (exchange.cuh) and
// multiplies what the ring holds (product.cuh); attend.cuh is what lies between.
//
// Every number has the bits that the kernels of one operator each give it: the same intervals of K in
// the same order, the same norm, epilogues, units and merges.
//
// All blocks must run at once, for they wait for each other. `counters`, a line apart: blocks at their
// end (and, beside it, which half of the exchange comes first), arrivals, arrivals of each KV head. All
// but the half are zero before and after.
//
// Macros: MXFP4 (0 | 1: weights of four bits), MODEL_TYPE, KV_TYPE, HIDDEN, INTERMEDIATE, NUM_HEADS,
// NUM_KV_HEADS, HEAD_SIZE, O_GROUP and DOWN_GROUP (weight rows that a block takes at once: 8 | 16),
// TOKENS_PER_BLOCK, TOKENS (most of a step), NUM_BLOCKS (of the grid), STAGES, IN_FLIGHT, ROOM (of
// shared memory: chain.cuh), SLOTS (tiles of a team that takes units of attention: 1 | 2), MAX_UNITS,
// EXCHANGE_BYTES.

#include "decoder_layers/attend.cuh"
#include "decoder_layers/copy.cuh"
#include "decoder_layers/product.cuh"

// Two numbers of queries, keys or values, which also go to the cache.
DEVICE void give_rotated(const Exchange& x, const rope_end::TokenConstants& t,
                         const rope_end::Rotated& y, int token, bool is_real) {
  if (y.head < NUM_HEADS) {
    const int at = Q_AT + (token * ATTENDED + y.head * HEAD_SIZE + y.dim) * 2;
    const u32 pair = attention::to_inner(MODEL_TYPE::pack_pair(y.left, y.right));
    give(x, at, u16(pair), is_real);
    give(x, at + y.apart * 2, u16(pair >> 16), is_real);
    return;
  }
  const Cached left = KV_TYPE::pack(__fdiv_rn(y.left, t.kv_scale));
  const Cached right = KV_TYPE::pack(__fdiv_rn(y.right, t.kv_scale));
  const int row = token * 2 * NUM_KV_HEADS + y.head - NUM_HEADS;
  const int at = KV_AT + (row * HEAD_SIZE + y.dim) * KV_BYTES;
  give_cached(x, at, left, is_real);
  give_cached(x, at + y.apart * KV_BYTES, right, is_real);
  if (is_real && t.row) t.row[y.dim] = left, t.row[y.dim + y.apart] = right;
}

DEVICE Value finish_plain(const PlainEnd::Epilogue& e, const PlainEnd::Rows& rows,
                          const PlainEnd::Token& t, int half, float sum) {
  return half ? plain_end::finish_one(e, rows, t, 1, sum) : plain_end::finish_one(e, rows, t, 0, sum);
}

// A thread's field of a layer, read a layer ahead, for nothing should wait for an address.
DEVICE u64 load_field(const Layer* layer) {
  return threadIdx.x < sizeof(Layer) / 8 ? __ldg((const u64*)layer + threadIdx.x) : 0;
}
DEVICE void keep_field(const Shared& shared, int half, u64 field) {
  if (threadIdx.x >= sizeof(Layer) / 8) return;
  const u32 to = shared.layers + half * sizeof(Layer) + threadIdx.x * 8;
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(field) : "memory");
}

extern "C" __global__ void __launch_bounds__(COMPUTE + COPY, 1)
    layers(const long long* table, int num_layers, int tokens, const u8* x, const uint4* residual,
           Value* down_out, uint4* residual_out, const float* rotary, const int* positions,
           const int* slots, const int* cu_q, const int* kv_lens, const int* block_tables, u8* exchanged,
           int* counters, float epsilon, float softmax_scale, int table_stride) {
  extern __shared__ u8 memory[];
  const Shared shared(shared_address(memory));
  const Layer* all = (const Layer*)table;
  if (MXFP4) make_mxfp4_table(shared.table);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      for (int c = 0; c < CHUNKS; ++c) barrier_init(shared.full + 8 * (CHUNKS * i + c), 1);
      barrier_init(shared.empty + 8 * i, 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  if (threadIdx.x >= COMPUTE) {  // leave registers to those that compute, of 504 three times 168
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int chunk = (threadIdx.x - COMPUTE) / 32;
    if (lane_id() == 0 && chunk < CHUNKS) copy_all(shared, all, num_layers, chunk);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_dependencies();
  const attention::Step step(cu_q, kv_lens, block_tables, positions, softmax_scale, table_stride);
  const int first_half = __ldcg(counters + 1);
  Exchange exchange;
  exchange.start(exchanged, first_half);
  uint4* kept = (uint4*)(exchanged + RESIDUAL_AT) + (long long)blockIdx.x * (TOKENS * HIDDEN / 8);
  Arrivals arrivals = {counters + 32, 0};
  int heads_expected = 0;
  u32 taken = 0;
  keep_field(shared, 0, load_field(all));
  meet();
#pragma unroll 1
  for (int l = 0; l < num_layers; ++l) {
    const Layer* layer = (const Layer*)(memory + (shared.layers - shared.base)) + l % 2;
    const bool is_last = l == num_layers - 1;
    const u64 next_field = load_field(all + (is_last ? l : l + 1));
    {
      const Weights& w = layer->qkv;
      const RopeEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, ATTENDED,
                                   rotary, positions, slots, layer->cache, layer->k_scale,
                                   layer->v_scale, TOKENS_PER_BLOCK};
      const auto bring = [&](bool) {
        if (l == 0) {
          bring_tokens<QkvSize, false>(shared, arrivals, x, tokens);
        } else {
          Norm norm(layer->qkv_norm, w.x_scale, kept);
          const u8* delta = exchange.now + exchange.other + DOWN_AT;  // of the layer before
          norm.bring<QkvSize>(shared, arrivals, delta, kept, nullptr, epsilon, tokens);
        }
      };
      const auto finish = [&](const Item<QkvSize>& item, const RopeEnd::Rows& rows,
                              const RopeEnd::Token& t, const float (&sum)[2]) {
        const rope_end::Rotated y = rope_end::finish_pair(e, rows, t, item.group, sum[0], sum[1]);
        give_rotated(exchange, t, y, item.token, item.is_real);
      };
      product<QkvSize, RopeEnd>(shared, arrivals, tokens, taken, e, bring, finish);
    }
    meet();  // keys and values come where tokens and sums were
    attention::attend(step, exchange, layer, shared, arrivals, counters + 64, heads_expected, l == 0);
    {
      const Weights& w = layer->o;
      const PlainEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, HIDDEN};
      const auto bring = [&](bool has_part) {
        const u8* from = exchange.now + ATTENDED_AT;
        if (has_part) bring_tokens<OSize, true>(shared, arrivals, from, tokens);
      };
      const auto finish = [&](const Item<OSize>& item, const PlainEnd::Rows& rows,
                              const PlainEnd::Token& t, const float (&sum)[Item<OSize>::ROWS]) {
        const int at = O_AT + (item.token * HIDDEN + item.row()) * 2;
#pragma unroll
        for (int r = 0; r < Item<OSize>::ROWS; ++r) {
          give(exchange, at + 16 * r, finish_plain(e, rows, t, item.half(r), sum[r]), item.is_real);
        }
      };
      product<OSize, PlainEnd>(shared, arrivals, tokens, taken, e, bring, finish);
    }
    {
      const Weights& w = layer->gate_up;
      const SwigluEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens,
                                     INTERMEDIATE, layer->activated_scale};
      const auto bring = [&](bool) {
        Norm norm(layer->mlp_norm, w.x_scale, l == 0 ? residual : kept);
        uint4* also = is_last && blockIdx.x == 0 ? residual_out : nullptr;
        norm.bring<GateUpSize>(shared, arrivals, exchange.now + O_AT, kept, also, epsilon, tokens);
      };
      const auto finish = [&](const Item<GateUpSize>& item, const SwigluEnd::Rows& rows,
                              const SwigluEnd::Token& t, const float (&sum)[2]) {
        const int column = 8 * item.group + threadIdx.x % 32 / 4;
        give(exchange, ACTIVATED_AT + item.token * INTERMEDIATE + column,
             swiglu_end::finish_pair(e, rows, t, sum[0], sum[1]), item.is_real);
      };
      product<GateUpSize, SwigluEnd>(shared, arrivals, tokens, taken, e, bring, finish);
    }
    keep_field(shared, (l + 1) % 2, next_field);
    {
      const Weights& w = layer->down;
      const PlainEnd::Epilogue e = {nullptr, w.weight_scale, w.x_scale, w.bias, 0, tokens, HIDDEN};
      const auto bring = [&](bool has_part) {
        const u8* from = exchange.now + ACTIVATED_AT;
        if (has_part) bring_tokens<DownSize, true>(shared, arrivals, from, tokens);
      };
      const auto finish = [&](const Item<DownSize>& item, const PlainEnd::Rows& rows,
                              const PlainEnd::Token& t,
                              const float (&sum)[Item<DownSize>::ROWS]) {
        const int place = item.token * HIDDEN + item.row();
#pragma unroll
        for (int r = 0; r < Item<DownSize>::ROWS; ++r) {
          const Value y = finish_plain(e, rows, t, item.half(r), sum[r]);
          give(exchange, DOWN_AT + (place + 8 * r) * 2, y, item.is_real && !is_last);
          if (is_last && item.is_real) down_out[place + 8 * r] = y;
        }
      };
      product<DownSize, PlainEnd>(shared, arrivals, tokens, taken, e, bring, finish);
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
      counters[0] = 0, counters[1] = (first_half + num_layers) & 1;
      for (int i = 1; i < 2 + NUM_KV_HEADS; ++i) counters[32 * i] = 0;
    }
  }
}

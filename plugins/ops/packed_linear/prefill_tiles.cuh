// How a warpgroup of the kernel for many tokens goes through its tiles: sums of intervals, and when they are stored.
#pragma once

#include "ops/packed_linear/prefill_handover.cuh"
#include "ops/packed_linear/prefill_products.cuh"

// Stores one row tile of a unit (the tile of work of a block), or leaves its sums to the next block.
struct Store {
  const Epilogue& epilogue;
  const Handover& handover;
  const Shared& shared;
  const Work& work;
  const Divisor& divisor;
  int warpgroup;

  DEVICE void keep(const TokenValues<TILE_TOKENS>& token_values) const {
    token_values.keep(values());
  }
  DEVICE u32 values() const {
    return shared.values + warpgroup * TokenValues<TILE_TOKENS>::BYTES;
  }
  DEVICE int row_tile(int unit, int tile, int& token) const {
    int row_block;
    work.at(unit, row_block, token);
    return (row_block * WARPGROUPS + warpgroup) * WG_TILES + tile;
  }
  DEVICE void load_ahead(Ahead<TILE_TOKENS>& ahead, int unit, int tile) const {
    int token;
    const int its = row_tile(unit, tile, token);
    ahead.load(epilogue, its, work.row_tiles, token, values(), warpgroup);
  }
  DEVICE void leave(Ahead<TILE_TOKENS>& ahead, const float (&sum)[TILE_TOKENS / 2], int unit, int tile,
                    bool is_part) const {
    if (EVEN && is_part) {
      handover.leave(sum, tile);
      return;
    }
    int token;
    const int its = row_tile(unit, tile, token);
    store_tile<TILE_TOKENS>(epilogue, divisor, ahead, sum, its, work.row_tiles, token,
                            shared.staging + warpgroup * STAGING_BYTES, values(), warpgroup);
  }
};

#if WG_TILES == 2

// Sums are stored while other products run: those of the first row tile during the last interval of the second, those of
// the second during the first interval of the next unit.
DEVICE void consume_intervals(Consumer& consumer, const Work& work, const Store& store) {
  static_assert(!EVEN || !IS_FP8, "of two row tiles sums of intervals are not handed on");
  float sum[WG_TILES][TILE_TOKENS / 2], part[TILE_TOKENS / 2];
#pragma unroll
  for (int tile = 0; tile < WG_TILES; ++tile) clear(sum[tile]);
  Ahead<TILE_TOKENS> ahead[WG_TILES];
  int before = -1;
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(walk.unit));
#pragma unroll 1
    for (int start = walk.first; start < walk.last; start += INTERVAL) {
      const int count = min(INTERVAL, walk.last - start);
      const bool is_first = start == walk.first, is_last = start + INTERVAL >= walk.last;
      const Ring<B_STAGES> b_start = consumer.b;
      const bool store_before = is_first && before >= 0;
      consumer.begin(part, count, 0, store_before);
      if (store_before) {
        store.leave(ahead[LAST], sum[LAST], before, LAST, false);
        clear(sum[LAST]);
      }
      if (is_first) store.keep(token_values);
      if (is_last) {
#pragma unroll
        for (int tile = 0; tile < WG_TILES; ++tile) store.load_ahead(ahead[tile], walk.unit, tile);
      }
      consumer.end(part, count, 0, store_before);
      add(sum[0], part);
      consumer.b = b_start;
      consumer.begin(part, count, LAST, is_last);
      if (is_last) {
        store.leave(ahead[0], sum[0], walk.unit, 0, false);
        clear(sum[0]);
      }
      consumer.end(part, count, LAST, is_last);
      add(sum[LAST], part);
    }
    before = walk.unit;
  }
  if (before >= 0) store.leave(ahead[LAST], sum[LAST], before, LAST, false);
}

#else

// With registers for two parts products of an interval need not wait until the one before has been added. Only the
// second interval of a unit does, as the first runs while the unit before is stored.
DEVICE void consume_intervals(Consumer& consumer, const Work& work, const Store& store) {
  // Cosines and sines of 128 tokens have room in registers only when one of the parts is done.
  constexpr bool IS_EARLY = EPILOGUE != 2 || TILE_TOKENS < 128;
  float sum[TILE_TOKENS / 2], part[TILE_TOKENS / 2], other[TILE_TOKENS / 2];
  clear(sum);
  Ahead<TILE_TOKENS> ahead;
  int before = -1;
  bool is_part = false;
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(walk.unit));
    const int count = min(INTERVAL, walk.last - walk.first);
    consumer.begin(part, count, 0, true);
    if (before >= 0) {
      store.leave(ahead, sum, before, 0, is_part);
      clear(sum);
    }
    store.keep(token_values);
    if (IS_EARLY) store.load_ahead(ahead, walk.unit, 0);
    if (EVEN && walk.first > 0) store.handover.take(sum, 0, work.token_tiles());
    product_wait<0>();
#pragma unroll 1
    for (int chunk = 1; chunk < count; ++chunk) consumer.release(true);
#pragma unroll 1
    for (int start = walk.first + INTERVAL;; start += 2 * INTERVAL) {
      if (start >= walk.last) {
        if (!IS_EARLY) store.load_ahead(ahead, walk.unit, 0);
        product_wait<0>();
        consumer.add_done(part, sum);
        break;
      }
      consumer.follow(other, part, sum, min(INTERVAL, walk.last - start));
      if (start + INTERVAL >= walk.last) {
        if (!IS_EARLY) store.load_ahead(ahead, walk.unit, 0);
        product_wait<0>();
        consumer.add_done(other, sum);
        break;
      }
      consumer.follow(part, other, sum, min(INTERVAL, walk.last - start - INTERVAL));
    }
    before = walk.unit;
    is_part = EVEN && walk.last < work.chunks;
  }
  if (before >= 0) store.leave(ahead, sum, before, 0, is_part);
}

#endif

DEVICE void consume_chains(Consumer& consumer, const Work& work, const Store& store) {
#pragma unroll 1
  for (Walk walk(work); !walk.done(); walk.next()) {
    TokenValues<TILE_TOKENS> token_values;
    token_values.load(store.epilogue, work.token(walk.unit));
    float sum[WG_TILES][TILE_TOKENS / 2];
    Ahead<TILE_TOKENS> ahead;
    ahead.load_early(store.epilogue, work.token(walk.unit));
    if (EVEN && walk.first > 0) {
#pragma unroll
      for (int tile = 0; tile < WG_TILES; ++tile) store.handover.take(sum[tile], tile, work.token_tiles());
    }
    consumer.chains(sum, walk.last - walk.first, walk.first == 0);
    if (EVEN && walk.last < work.chunks) {
#pragma unroll
      for (int tile = 0; tile < WG_TILES; ++tile) store.handover.leave(sum[tile], tile);
      continue;
    }
    store.keep(token_values);
#pragma unroll
    for (int tile = 0; tile < WG_TILES; ++tile) {
      store.load_ahead(ahead, walk.unit, tile);
      store.leave(ahead, sum[tile], walk.unit, tile, false);
    }
  }
}

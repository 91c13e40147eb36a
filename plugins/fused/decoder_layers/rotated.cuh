// How layers.cu gives queries, keys and values to other blocks, and writes keys and values to the cache.
#pragma once

#include "fused/decoder_layers/exchange.cuh"
#include "fused/decoder_layers/product.cuh"

// The addresses of two values of a group of queries, keys or values: `at`, and `apart` further.
struct RotatedPlace {
  int at, apart;
  bool is_query;
  DEVICE RotatedPlace(int head, int dim, int apart_, int token) : is_query(head < NUM_HEADS) {
    const int row = token * 2 * NUM_KV_HEADS + head - NUM_HEADS;
    at = is_query ? Q_AT + (token * ATTENDED + head * HEAD_SIZE + dim) * 2
                  : KV_AT + (row * HEAD_SIZE + dim) * KV_BYTES;
    apart = apart_ * (is_query ? 2 : KV_BYTES);
  }
};

// Two values of queries, keys or values; they are written to the cache after they were given to other blocks.
struct CachedPair {
  Cached *to, left, right;  // of the cache: null for queries
  Divisor divisor;          // by its scale

  DEVICE void give(const Exchange& x, const rope_end::TokenConstants& t, const rope_end::Rotated& y,
                   int token) {
    const RotatedPlace place(y.head, y.dim, y.apart, token);
    if (place.is_query) {
      const u32 pair = attention::to_inner(MODEL_TYPE::pack_pair(y.left, y.right));
      ::give(x, place.at, u16(pair));
      ::give(x, place.at + place.apart, u16(pair >> 16));
      return;
    }
    if constexpr (attention::Same<KV_TYPE, E4M3>::value) {
      const u32 two = divisor.any_pair(MODEL_TYPE::pack_pair(y.left, y.right));
      left = Cached(two), right = Cached(two >> 8);
    } else {
      left = KV_TYPE::pack(__fdiv_rn(y.left, t.kv_scale));
      right = KV_TYPE::pack(__fdiv_rn(y.right, t.kv_scale));
    }
    give_cached(x, place.at, left);
    give_cached(x, place.at + place.apart, right);
    to = t.row ? t.row + y.dim : nullptr;
  }
};

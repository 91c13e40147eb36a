// Where what other blocks give lands in shared memory with 4-bit weights. A thread that does not compute looks at the
// counter and has tokens, queries and keys copied (fetch.cuh), while those that compute still expand a unit; they
// find values there that would otherwise be asked for only then. The output projection's tokens are asked for by
// those that need them: nothing is left to expand when they come.
//
// Values that were absent when they were copied are asked for as without a copy. Why a copy brings no older ones is
// in fetch.cuh.
#pragma once

#include "fused/decoder_layers/exchange.cuh"

// A copying warp is left over, besides that of prefetch.cuh. With two tokens the code would be too long (coded.cuh).
constexpr bool IS_FETCHED = CHUNKS < COPY / 32 - 1 && TOKENS == 1;
constexpr int QUERY_ROWS_BYTES = NUM_HEADS / NUM_KV_HEADS * HEAD_SIZE * 2, KEY_BYTES = HEAD_SIZE * KV_BYTES;
constexpr int TEAM_LANDING = QUERY_ROWS_BYTES + 2 * KEY_BYTES;  // a token's of a KV head: queries, key, value

// What lands for a product: FP8 tokens, or what is added to the residual.
template <class S>
constexpr int LANDING_BYTES = TOKENS * S::K * 2;
template <>
constexpr int LANDING_BYTES<DownSize> = TOKENS * DownSize::K;
// Tokens of a product land behind their place, where its sums will be; if there is no room, at the end, where some
// have to be taken by all threads before others are written.
template <class S>
constexpr bool LANDS_APART = S::TOKEN_BYTES + LANDING_BYTES<S> <= ROOM;
template <class S>
DEVICE u32 landing(const Shared& shared) {
  static_assert(!IS_FETCHED || (LANDING_BYTES<S> <= ROOM && LANDING_BYTES<S> % 16 == 0), "copied at once");
  return shared.tokens + (LANDS_APART<S> ? S::TOKEN_BYTES : (ROOM - LANDING_BYTES<S>) / 128 * 128);
}

// The address of shared memory as instructions without a state space take it.
DEVICE const u8* generic(u32 at) {
  u64 y;
  asm("cvta.shared.u64 %0, %1;" : "=l"(y) : "l"(u64(at)));
  return (const u8*)y;
}

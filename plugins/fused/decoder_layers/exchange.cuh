// How blocks hand numbers to each other: in global memory, where a number says itself that it has
// arrived. All ones is a NaN in every type (another one takes its place), so numbers are stored
// inverted and zero means absent. A reader asks again until nothing is absent, so
// no block waits until its writes are seen. So that not all of them ask all the time, one thread of a
// block first waits for a counter, which may be ahead of the numbers. It waits for all but a few: when
// the answer comes, theirs are mostly there.
//
// There are two halves, for layers in turn. Whoever writes a number of this layer clears the place of
// the same number in the other half, where nobody waits for it: mostly when it has counted. Then nobody
// reads there any more: every block needs something of every stage that all have done before it, and
// has read what was there to do its part of that. Nor does anybody yet: who looks for the next layer's
// number there has needed what its writer did since.
// Which half comes first is kept from launch to launch, for the last layer's half is not cleared.
#pragma once

#include "fused/decoder_layers/chain.cuh"

constexpr int KV_BYTES = KV_TYPE::bytes;
constexpr int Q_AT = 0;                                                       // [TOKENS, ATTENDED]
constexpr int KV_AT = Q_AT + TOKENS * ATTENDED * 2;                           // [TOKENS, 2, heads, size]
constexpr int ATTENDED_AT = KV_AT + TOKENS * 2 * NUM_KV_HEADS * HEAD_SIZE * KV_BYTES;
constexpr int O_AT = ATTENDED_AT + TOKENS * ATTENDED;                         // [TOKENS, HIDDEN]
constexpr int ACTIVATED_AT = O_AT + TOKENS * HIDDEN * 2;                      // [TOKENS, INTERMEDIATE]
constexpr int DOWN_AT = ACTIVATED_AT + TOKENS * INTERMEDIATE;                 // [TOKENS, HIDDEN]
constexpr int STATES_AT = DOWN_AT + TOKENS * HIDDEN * 2;                      // [heads, units, 8] pairs
constexpr int SUMS_AT = STATES_AT + NUM_KV_HEADS * MAX_UNITS * 8 * 8;         // [heads, units, 8, size]
constexpr int HALF = SUMS_AT + NUM_KV_HEADS * MAX_UNITS * 8 * HEAD_SIZE * 4;
static_assert(2 * HALF == EXCHANGE_BYTES, "as allocated");

struct Exchange {
  u8* now;           // this layer's half
  long long other;   // from there to the other one

  DEVICE void start(u8* base, int half) {
    now = base + half * HALF;
    other = half ? -HALF : HALF;
  }
  DEVICE void turn() {
    now += other;
    other = -other;
  }
};

DEVICE void put(u8* to, u32 x) {
  asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
DEVICE void put(u16* to, u16 x) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory");
}
DEVICE void put(uint2* to, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y)
               : "memory");
}

template <class Word>
DEVICE Word inverted(Word x) {  // a NaN of all ones becomes the one without its sign
  const Word y = Word(~x);
  return y ? y : Word(Word(1) << (8 * sizeof(Word) - 1));
}

// A number of 8 or 16 bits at byte `at` of the half.
DEVICE void give(const Exchange& x, int at, u8 value) { put(x.now + at, u32(inverted(value))); }
DEVICE void give(const Exchange& x, int at, u16 value) { put((u16*)(x.now + at), inverted(value)); }
// Its place in the other half.
template <int BYTES>
DEVICE void clear(const Exchange& x, int at) {
  if (BYTES == 1) put(x.now + x.other + at, u32(0));
  else put((u16*)(x.now + x.other + at), u16(0));
}
// Parts of attention lie there as they are, zero as the negative one: of sums it does not matter which.
constexpr u32 NO_SUM = 0x80000000u;
DEVICE u32 present(float x) { return __float_as_uint(x) ? __float_as_uint(x) : NO_SUM; }
DEVICE void put_pair(u8* to, float a, float b) { put((uint2*)to, {present(a), present(b)}); }

// What lies there now, still inverted.
DEVICE uint4 look16(const u8* at) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
// `otherwise` where it is none that somebody makes.
DEVICE uint2 look8(const u8* at, bool is_there, uint2 otherwise) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "@p ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];\n}"
      : "+r"(otherwise.x), "+r"(otherwise.y)
      : "l"(at), "r"(u32(is_there))
      : "memory");
  return otherwise;
}
DEVICE u32 look4(const u8* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// Not zero where a number of BYTES is absent in a word: bits of TOPS, without branches.
template <int BYTES>
DEVICE u32 gaps(u32 x) {
  constexpr u32 ONES = BYTES == 1 ? 0x01010101u : BYTES == 2 ? 0x00010001u : 1u;
  constexpr u32 TOPS = BYTES == 1 ? 0x80808080u : BYTES == 2 ? 0x80008000u : 0x80000000u;
  return (x - ONES) & ~x & TOPS;
}
template <int BYTES>
DEVICE u32 gaps(const uint4& x) {
  return gaps<BYTES>(x.x) | gaps<BYTES>(x.y) | gaps<BYTES>(x.z) | gaps<BYTES>(x.w);
}
DEVICE uint4 upright(const uint4& x) { return {~x.x, ~x.y, ~x.z, ~x.w}; }

// Arrivals that nobody waits for: of blocks (8 to 32 are as good), and of warps with a head's units (those
// of one).
constexpr int EARLY = 8, EARLY_WARPS = 4;

// Counts those that have done their part of a stage, of all stages so far.
struct Arrivals {
  int* counter;
  int expected;

  static DEVICE void ask(const int* counter, int expected) {
    int arrived;
    do {
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < expected);
  }
  static DEVICE void add(int* counter) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
  }
  DEVICE void wait(int early) const {
    if (threadIdx.x == 0) ask(counter, expected - early);
    meet();
  }
  DEVICE void wait_in_warp() const {
    if (threadIdx.x % 32 == 0) ask(counter, expected - EARLY);
    __syncwarp();
  }
  // All of the block's threads, or all of its first warp's, have given what the block makes.
  template <bool IS_OF_ONE_WARP>
  DEVICE void arrive() const {
    if (IS_OF_ONE_WARP) __syncwarp();
    else meet();
    if (threadIdx.x == 0) add(counter);
  }
};

// COUNT pieces of 16 bytes of this thread, `stride` apart, those that `has` says. `meanwhile` is done
// while they are on their way.
template <int BYTES, int COUNT, class Has, class Meanwhile>
DEVICE void take_pieces(uint4 (&to)[COUNT], const u8* from, int stride, const Has& has,
                        const Meanwhile& meanwhile) {
  u32 missing;
  do {
    missing = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (has(i)) to[i] = look16(from + (long long)i * stride);
    }
    meanwhile();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) missing |= has(i) ? gaps<BYTES>(to[i]) : 0;
  } while (missing);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) to[i] = upright(to[i]);
}

// A cached number as it is handed on. Integers have no NaN, but neither have they -128: they are given
// with their lower bits inverted, so that this is what all ones mean.
template <class Type>
struct CachedWord {
  typedef u16 Word;
  static constexpr u32 MASK = 0;
};
template <>
struct CachedWord<E4M3> {
  typedef u8 Word;
  static constexpr u32 MASK = 0;
};
template <>
struct CachedWord<INT8> {
  typedef u8 Word;
  static constexpr u32 MASK = 0x7F7F7F7F;
};
DEVICE void give_cached(const Exchange& x, int at, Cached value) {
  typedef CachedWord<KV_TYPE> Type;
  typedef Type::Word Word;
  give(x, at, Word(Word(value) ^ Word(Type::MASK)));
}
DEVICE uint4 upright_cached(const uint4& x) {
  constexpr u32 ONES = ~CachedWord<KV_TYPE>::MASK;
  return {x.x ^ ONES, x.y ^ ONES, x.z ^ ONES, x.w ^ ONES};
}

// How blocks pass results to each other: through global memory, where the value itself shows whether it has
// arrived. All ones is a NaN in every type (results that are this NaN become another NaN), so values are
// stored inverted, and zero means absent. A reader polls until no value is absent, so no writer waits until
// its stores are visible. To keep all threads from polling, one thread of a block first waits for a counter,
// which may be ahead of the values. It waits for all but the last few counts: by the time the answer arrives,
// the values of those are mostly there.
//
// There are two buffers (`half`), used by alternate layers. Whoever writes a value of this layer clears the
// place of the same value in the other buffer, usually after it has increased the counter, when no block waits
// for it. This is safe. No block still reads the old value: every block needs a result of every stage that
// all blocks have contributed to before it, and has read the old values to make its own contribution. And no
// block polls for the new value yet: a block that looks for the next layer's value there has needed a result
// that the clearing block wrote since.
// Which buffer comes first is remembered from launch to launch, because the last layer's is not cleared.
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
  u8* now;           // this layer's buffer
  long long other;   // offset from there to the other buffer

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
DEVICE Word inverted(Word x) {  // a NaN of all ones becomes the NaN without the sign bit
  const Word y = Word(~x);
  return y ? y : Word(Word(1) << (8 * sizeof(Word) - 1));
}

// Writes an 8-bit or 16-bit value at byte `at` of this layer's buffer.
DEVICE void give(const Exchange& x, int at, u8 value) { put(x.now + at, u32(inverted(value))); }
DEVICE void give(const Exchange& x, int at, u16 value) { put((u16*)(x.now + at), inverted(value)); }
// Clears its place in the other buffer.
template <int BYTES>
DEVICE void clear(const Exchange& x, int at) {
  if (BYTES == 1) put(x.now + x.other + at, u32(0));
  else put((u16*)(x.now + x.other + at), u16(0));
}
// Partial results of attention are stored without inversion, zero as negative zero: for sums the sign of zero
// does not matter.
constexpr u32 NO_SUM = 0x80000000u;
DEVICE u32 present(float x) { return __float_as_uint(x) ? __float_as_uint(x) : NO_SUM; }
DEVICE void put_pair(u8* to, float a, float b) { put((uint2*)to, {present(a), present(b)}); }

// With 4-bit weights and one token what is looked at may be a copy in shared memory (landing.cuh).
#if MXFP4 && TOKENS == 1
#define EXCHANGED
#else
#define EXCHANGED ".global"
#endif
// What is stored there now, still inverted.
DEVICE uint4 look16(const u8* at) {
  uint4 x;
  asm volatile("ld.relaxed.gpu" EXCHANGED ".v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
// `otherwise` where no block writes a value.
template <bool IS_COPIED = false>
DEVICE uint2 look8(const u8* at, bool is_there, uint2 otherwise) {
#define LOOK(space)                                                  \
  asm volatile(                                                      \
      "{\n.reg .pred p;\n"                                           \
      "setp.ne.u32 p, %3, 0;\n"                                      \
      "@p ld.relaxed.gpu" space ".v2.u32 {%0, %1}, [%2];\n}"         \
      : "+r"(otherwise.x), "+r"(otherwise.y)                         \
      : "l"(at), "r"(u32(is_there))                                  \
      : "memory")
  if (IS_COPIED) LOOK("");
  else LOOK(".global");
#undef LOOK
  return otherwise;
}
DEVICE u32 look4(const u8* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu" EXCHANGED ".u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// Nonzero if a value of BYTES bytes is absent in a word: bits of TOPS, without branches.
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

// Arrivals that are not waited for: of blocks (any number from 8 to 32 is equally fast), and of warps with a
// head's work items (those of one item).
constexpr int EARLY = 8, EARLY_WARPS = 4;

// Counts the arrivals of all stages so far: those that have done their part of a stage.
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
  // All of the block's threads, or all of its first warp's, have written what the block computes.
  template <bool IS_OF_ONE_WARP>
  DEVICE void arrive() const {
    if (IS_OF_ONE_WARP) __syncwarp();
    else meet();
    if (threadIdx.x == 0) add(counter);
  }
};

// Reads COUNT pieces of 16 bytes for this thread, `stride` apart, those for which `has` is true: from `first`, a copy,
// and if any is absent there, from where they are exchanged. `meanwhile` runs while they are in flight.
template <int BYTES, int COUNT, class Has, class Meanwhile>
DEVICE void take_pieces(uint4 (&to)[COUNT], const u8* first, const u8* exchanged, int stride, const Has& has,
                        const Meanwhile& meanwhile) {
  const u8* from = first;
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
    made(from = exchanged);  // opaque: the first turn shall not have code of its own
  } while (missing);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) to[i] = upright(to[i]);
}

// A cached value as it is exchanged. Integers have no NaN, but -128 does not occur either: they are written
// with their lower bits inverted, so that -128 is all ones.
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

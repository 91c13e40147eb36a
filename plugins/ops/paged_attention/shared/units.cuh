// How a context is divided into work items (`unit`), and constants that generation.cu and batch.cu derive from the macros
// they share.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

#ifndef TILE_KEYS
#define TILE_KEYS 64  // FP8 products have larger tiles
#endif
#ifndef PARTS
#define PARTS 1  // thread blocks that have the same rows, each with some of the values' dimensions
#endif
constexpr int KEYS = TILE_KEYS;
constexpr int OWN_SIZE = SIZE / PARTS;  // dimensions of values that a thread block has
constexpr long long PAGE = (long long)HEADS * TOKENS_PER_BLOCK * SIZE;  // elements of a page's keys
constexpr int SPAN = TOKENS_PER_BLOCK < KEYS ? TOKENS_PER_BLOCK : KEYS;  // keys of one page in a tile
constexpr int TILE_PAGES = KEYS / SPAN, TILES_PER_PAGE = TOKENS_PER_BLOCK / SPAN;
static_assert(TILE_PAGES <= 32, "a warp reads a tile's pages at once");

template <bool CONDITION, class A, class B>
struct Either {
  typedef A Type;
};
template <class A, class B>
struct Either<false, A, B> {
  typedef B Type;
};
typedef Either<KV_TYPE::bytes == 1, FP16, MODEL_TYPE>::Type Inner;  // type of the products' operands

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};
constexpr bool NARROWS = !Same<Inner, MODEL_TYPE>::value;  // queries are converted to float16

// Converts two query values to the type of the tensor core operands.
DEVICE u32 to_inner(u32 pair) {
  if (!NARROWS) return pair;
  const float low = MODEL_TYPE::unpack(u16(pair)), high = MODEL_TYPE::unpack(u16(pair >> 16));
  u32 y;  // saturates at 65504; NaN stays NaN
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// The thread's index. Values derived from it are computed here and not earlier, to save registers.
DEVICE int thread_from_here() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// A number in shared memory, read again instead of kept in a register.
DEVICE int reload(const int& x) { return *(const volatile int*)&x; }

DEVICE int load_int(const int* p) { return __ldcg(p); }  // bypasses L1: other kernels write these

DEVICE int load_int_now(const int* p) {  // the same, where it is written in the program
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// What createpolicy gives for all lines (CUTLASS has the same numbers, CacheHintSm90). Computed in a program they cost time.
constexpr u64 EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000;

// Copies 16 bytes that are read once, which leave L2 first. A lane has its target in a register of its own: where a part of it
// is the warp's, NVRTC 13.0 makes an illegal instruction (test_oldest_compiler.py).
DEVICE void stream_chunk(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "l"(EVICT_FIRST)
               : "memory");
}

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float finite(float top) { return top == minus_infinity() ? 0.0f : top; }

DEVICE int highest_bit(int x) { return 31 - __clz(x); }

DEVICE constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }
constexpr int LAST_OCTAVE = log2_of(MOST_UNIT / UNIT) - 1;  // from 16 UNIT << LAST_OCTAVE tiles on work items have MOST_UNIT
static_assert(MOST_UNIT == UNIT << (LAST_OCTAVE + 1), "a power of two");

DEVICE constexpr int unit_start(int unit) {
  if (unit < 16 || MOST_UNIT == UNIT) return UNIT * unit;
  const int octave = (unit - 16) / 8 < LAST_OCTAVE ? (unit - 16) / 8 : LAST_OCTAVE;
  return UNIT * ((16 << octave) + (unit - 16 - 8 * octave) * (2 << octave));
}

DEVICE int count_units(int tiles) {
  const int last = (tiles + UNIT - 1) / UNIT - 1;
  if (last < 16 || MOST_UNIT == UNIT) return last + 1;
  const int octave = min(highest_bit(last) - 4, LAST_OCTAVE);
  return 16 + 8 * octave + ((last - (16 << octave)) >> (octave + 1)) + 1;
}

// The step parameters of one request.
struct Numbers {
  int start, end, limit;  // its tokens, its keys
  int tree, root;         // its first row of `paths` or -1, and the position of its root (tree/paths.cuh)
};

// One warp reads them for its block, one per lane: every block reads the same few lines, and L2 serves
// the requests for one line one after another.
DEVICE int read_number(const int* cu_q, const int* kv_lens, int request) {
  const int lane = threadIdx.x % 32;
  int x = 0;
  if (lane < 3) x = load_int(lane == 2 ? kv_lens + request : cu_q + request + lane);
  return x;
}

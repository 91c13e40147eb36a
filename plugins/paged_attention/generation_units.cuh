// Where generation.cu cuts a context, and what follows from its macros.
#pragma once

#include "packed_linear/hopper.cuh"

constexpr int KEYS = 64;
constexpr int THREADS = 128, ROWS = 64;
constexpr int HALVES = SIZE / 64;                    // operands of 64 dimensions: 128 bytes a key
constexpr int HALF_BYTES = KEYS * 128;
constexpr int OPERAND_BYTES = HALVES * HALF_BYTES;
constexpr int PIECES = SIZE * KV_TYPE::bytes / 16;   // of a key, 16 bytes each
constexpr int KEY_STEP = THREADS / PIECES;           // keys that the threads load at once
constexpr int LOADS = KEYS / KEY_STEP;
constexpr int STEPS = SIZE / 16;                     // of a product along the head
constexpr int SHARE = SPLITS / 2;                   // thread blocks that take the last units
constexpr long long PAGE = (long long)HEADS * TOKENS_PER_BLOCK * SIZE;  // elements of a page's keys
constexpr int SPAN = TOKENS_PER_BLOCK < KEYS ? TOKENS_PER_BLOCK : KEYS;  // of one page in a tile
constexpr int TILE_PAGES = KEYS / SPAN, TILES_PER_PAGE = TOKENS_PER_BLOCK / SPAN;
constexpr bool IS_FP8 = KV_TYPE::bytes == 1;
static_assert(UNIT == 1, "the first 16 units are one tile each");
static_assert(TILE_PAGES <= 32, "a warp reads a tile's pages at once");
static_assert(KEY_STEP <= KEYS && THREADS % PIECES == 0, "a key is loaded by one pass");

template <bool CONVERTED>
struct InnerType {
  typedef FP16 Type;
};
template <>
struct InnerType<false> {
  typedef MODEL_TYPE Type;
};
typedef InnerType<IS_FP8>::Type Inner;  // of the products' operands

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};
constexpr bool NARROWS = !Same<Inner, MODEL_TYPE>::value;  // queries, to float16

DEVICE int load_int(const int* p) { return __ldcg(p); }  // not from L1: others write these

// What follows from x is computed here, not ahead of a loop, where it would take registers.
DEVICE void hold_back(int& x) { asm volatile("" : "+r"(x)); }

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float finite(float top) { return top == minus_infinity() ? 0.0f : top; }

DEVICE int highest_bit(int x) { return 31 - __clz(x); }

DEVICE int unit_start(int unit) {
  if (unit < 16) return unit;
  const int octave = (unit - 16) / 8;
  return (16 << octave) + ((unit - 16) % 8) * (2 << octave);
}

DEVICE int count_units(int tiles) {
  const int last = tiles - 1;
  if (last < 16) return tiles;
  const int octave = highest_bit(last) - 4;
  return 16 + 8 * octave + ((last - (16 << octave)) >> (octave + 1)) + 1;
}

// The units of one thread block of a cluster: the last SHARE units, which are half of the work, go
// to one half of the cluster, what is left of them to the other half.
struct Units {
  int unit, step, end, tiles;  // of the request
  int tile, unit_end;

  DEVICE void start(int rank, int tiles_) {
    tiles = max(tiles_, 0);
    const int units = count_units(tiles);
    unit = rank, step = SPLITS, end = units;
    if (units > SPLITS) {
      step = SHARE;
      if (rank < SHARE) {
        end = units - SHARE;
      } else {
        unit = units - 1 - (rank - SHARE);
      }
    }
    enter();
  }
  DEVICE bool done() const { return unit >= end; }
  DEVICE bool ends_unit() const { return tile + 1 == unit_end; }
  DEVICE void next() {
    if (!ends_unit()) {
      ++tile;
      return;
    }
    unit += step;
    enter();
  }
  DEVICE void enter() {
    tile = unit_start(unit);
    unit_end = min(unit_start(unit + 1), tiles);
  }
};

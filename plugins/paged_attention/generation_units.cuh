// How generation.cu shares a context's units among thread blocks, and what follows from its macros.
#pragma once

#include "paged_attention/units.cuh"

constexpr int THREADS = 128, ROWS = 64;
constexpr int HALVES = SIZE / 64;                    // operands of 64 dimensions: 128 bytes a key
constexpr int HALF_BYTES = KEYS * 128;
constexpr int OPERAND_BYTES = HALVES * HALF_BYTES;
constexpr int PIECES = SIZE * KV_TYPE::bytes / 16;   // of a key, 16 bytes each
constexpr int KEY_STEP = THREADS / PIECES;           // keys that the threads load at once
constexpr int LOADS = KEYS / KEY_STEP;
constexpr int STEPS = SIZE / 16;                     // of a product along the head
constexpr int SHARE = SPLITS / 2;                   // thread blocks that take the last units
constexpr bool IS_FP8 = KV_TYPE::bytes == 1;
static_assert(KEY_STEP <= KEYS && THREADS % PIECES == 0, "a key is loaded by one pass");

// What follows from x is computed here, not ahead of a loop, where it would take registers.
DEVICE void hold_back(int& x) { asm volatile("" : "+r"(x)); }

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

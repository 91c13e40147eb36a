// How generation.cu divides the work items (`unit`) of a context among thread blocks.
#pragma once

#include "ops/paged_attention/shared/operands.cuh"

constexpr int ROWS = 64;
constexpr int SHARE = SPLITS / 2;  // thread blocks that process the last work items

// The work items of one thread block of a cluster. While their size doubles with the context, the last SHARE
// items are half of the work and go to one half of the cluster, those to the left of them to the other half.
// In longer contexts they are dealt out in turn.
struct Units {
  int unit, step, end, tiles;  // of the request
  int tile, unit_end;

  DEVICE void start(int rank, int tiles_) {
    tiles = max(tiles_, 0);
    const int units = count_units(tiles);
    unit = rank, step = SPLITS, end = units;
    if (units > SPLITS && tiles <= 16 << (LAST_OCTAVE + 1)) {
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

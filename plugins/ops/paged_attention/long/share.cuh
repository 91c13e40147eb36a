// Which tiles of a context a thread block has, of several that share it: whole work items (`unit`).
#pragma once

#include "ops/paged_attention/shared/units.cuh"

constexpr int MORE = TREE ? TAIL_TILES : 0;  // tiles that take as long as what follows those that are divided

DEVICE int round_up(int tiles, int most = MOST_UNIT) { return (tiles + most - 1) & -most; }
// The most tiles of a work item in contexts of so many.
DEVICE int largest_unit(int tiles) {
  return UNIT == 1 || tiles > 32 * UNIT ? MOST_UNIT : tiles > 16 * UNIT ? min(2 * UNIT, MOST_UNIT) : UNIT;
}

// What work items take: the first 16, of one tile each, ONE; others 4 SCALE times 2^octave, and their ends END, but none is added for
// those of the most tiles, which most shares have.
template <int ONE, int SCALE, int END>
struct Costs {
  DEVICE static constexpr int unit_cost(int octave) { return SCALE * (4 << octave) + END * (octave < LAST_OCTAVE); }
  DEVICE static int cost(int tiles) {
    int its = min(tiles, 16) * ONE;
#pragma unroll
    for (int octave = 0; octave <= LAST_OCTAVE; ++octave) {
      const int more = max(tiles - (16 << octave), 0), most = octave < LAST_OCTAVE ? 16 << octave : more;
      its += min(more, most) * unit_cost(octave) / (2 << octave);
    }
    return its;
  }
  // The last work item behind those that take no more than that.
  DEVICE static int unit_behind(int cost) {
    int unit = cost / ONE, from = ONE * 16;
#pragma unroll
    for (int octave = 0; octave <= LAST_OCTAVE; ++octave) {
      if (cost >= from) unit = 16 + 8 * octave + (cost - from) / unit_cost(octave);
      from += 8 * unit_cost(octave);
    }
    return unit;
  }
};

// Tiles [begin, end) of a thread block. Costs in half tiles: the end of a work item takes about as long as half a tile.
struct Share : Costs<3, 1, 1> {
  int begin, end, first_unit;

  // Where share `nth` of `count` begins, of `tiles` of a context: where a work item does. What follows the tiles, of trees, is
  // the last share's, and takes as long as `more` tiles. Shares of longer chains take about as long, but none has more tiles than
  // if all had as many: work items of the most tiles cannot be divided.
  DEVICE static int border(int tiles, int more, int nth, int count) {
    const int last = count_units(tiles + 1) - 1;
    if (nth == count) return tiles;
    if (UNIT > 1) return min(unit_start(count_units((tiles * nth + count - 1) / count)), tiles);  // no share is shorter than a work item
    if (TREE || tiles <= count * MOST_UNIT) return unit_start(min(count_units((tiles + more) * nth / count + 1) - 1, last));
    const int most = round_up((tiles + count - 1) / count);
    const int from_end = min(round_up(tiles) - (count - nth) * most, unit_start(last));
    return max(unit_start(min(unit_behind(cost(tiles) * nth / count), last)), from_end);
  }
};

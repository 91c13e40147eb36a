// Which tiles of a context a thread block has, of several that share it: whole work items (`unit`).
#pragma once

#include "ops/paged_attention/shared/units.cuh"

constexpr int MORE = TREE ? TAIL_TILES : 0;  // tiles that take as long as what follows those that are divided

DEVICE float reciprocal(int x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(float(x)));
  return y;
}
// Division that rounds up, of numbers below 2^21: x by y, whose reciprocal is known.
DEVICE int divide_up(int x, int y, float by) { return int((float(x) + (float(y) - 0.5f)) * by); }

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

// Shares of a context, each of as many whole work items as `most` tiles have room for: few thread blocks come to the end much later
// than others, though long work items are as long as some shares.
struct EqualShares {
  static constexpr int LENGTHS = LAST_OCTAVE + 2;  // of work items
  int most;                                        // no fewer than the longest work item has
  // The first share that begins among work items of each length, where it does, and how far the one before would go with all its tiles.
  int first[LENGTHS], from[LENGTHS], reach[LENGTHS];
  float by[LENGTHS];  // reciprocals of `step`

  // Without branches, as lanes try different numbers and would take all of them one after another.
  DEVICE explicit EqualShares(int most_) : most(most_) {
#pragma unroll
    for (int i = 0; i < LENGTHS; ++i) by[i] = reciprocal(step(i));
    first[0] = from[0] = reach[0] = 0;
#pragma unroll
    for (int i = 0; i + 1 < LENGTHS; ++i) {
      const int end = 16 * unit(i), times = shares_before(i, end), its_reach = from[i] + times * step(i) + most;
      const bool is_behind = from[i] >= end;
      first[i + 1] = is_behind ? first[i] : first[i] + times + 1, reach[i + 1] = is_behind ? reach[i] : its_reach;
      from[i + 1] = is_behind ? from[i] : its_reach & -(2 * UNIT << min(highest_bit(its_reach / UNIT) - 4, LAST_OCTAVE));
    }
  }
  DEVICE int count(int tiles) const {
    int its = 1 + shares_before(0, tiles);
#pragma unroll
    for (int i = 1; i < LENGTHS; ++i) its = tiles > reach[i] ? first[i] + 1 + shares_before(i, tiles) : its;
    return its;
  }
  DEVICE int begin(int nth) const {
    int its = nth * step(0);
#pragma unroll
    for (int i = 1; i < LENGTHS; ++i) its = nth >= first[i] ? from[i] + (nth - first[i]) * step(i) : its;
    return its;
  }

 private:
  DEVICE static constexpr int unit(int i) { return UNIT << i; }
  DEVICE int step(int i) const { return max(most & -unit(i), UNIT); }
  // Of those that begin among work items of a length, how many end before `end` whatever they have.
  DEVICE int shares_before(int i, int end) const {
    return divide_up(max(end - most - from[i], 0), step(i), by[i]);
  }
};

// Tiles [begin, end) of a thread block. Costs in half tiles: the end of a work item takes about as long as half a tile.
struct Share : Costs<3, 1, 1> {
  int begin, end, first_unit;

  // Where share `nth` of `count` begins, of `tiles` of a context: where a work item does. Where these are long, EqualShares says which,
  // of shares of up to `most_tiles`. What follows the tiles, of trees, is the last share's, and takes as long as `more` tiles. Shares of
  // longer chains take about as long, but none has more tiles than if all had as many: work items of the most tiles cannot be divided.
  DEVICE static int border(int tiles, int more, int nth, int count, int most_tiles = 0) {
    const int last = count_units(tiles + 1) - 1;
    if (nth == count) return tiles;
    if (UNIT > 1) return EqualShares(most_tiles).begin(nth);
    if (TREE || tiles <= count * MOST_UNIT) return unit_start(min(count_units((tiles + more) * nth / count + 1) - 1, last));
    const int most = round_up((tiles + count - 1) / count);
    const int from_end = min(round_up(tiles) - (count - nth) * most, unit_start(last));
    return max(unit_start(min(unit_behind(cost(tiles) * nth / count), last)), from_end);
  }
};

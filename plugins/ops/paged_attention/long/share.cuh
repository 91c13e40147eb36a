// Which tiles of a context a thread block processes, if several blocks share the context: whole work items (`unit`).
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

// What a context's tiles take: where work items are long in half tiles, and each takes ITEM_END more, for its first tile's largest logits and
// for being merged. Elsewhere in tiles.
#ifndef ITEM_END
#define ITEM_END 0
#endif
struct ContextCost {
  static constexpr int TILE = UNIT > 1 ? 2 : 1;
  static constexpr int LENGTHS = LAST_OCTAVE + 2;  // of work items: from UNIT on, each twice the one before

  // A work item of a length, and those of all lengths before.
  DEVICE static constexpr int unit(int length) { return TILE * (UNIT << length) + ITEM_END; }
  DEVICE static constexpr int before(int length) {
    int its = 0;
    for (int i = 0; i < length; ++i) its += (i == 0 ? 16 : 8) * unit(i);
    return its;
  }
  DEVICE static int of(int tiles) { return TILE * tiles + ITEM_END * count_units(tiles); }
  // The last work item behind those that take no more than that.
  DEVICE static int unit_behind(int cost) {
    int its = cost / unit(0);
#pragma unroll
    for (int i = 1; i < LENGTHS; ++i) its = cost >= before(i) ? 8 * (i + 1) + (cost - before(i)) / unit(i) : its;
    return its;
  }
  // The last one of a context, which none is longer than.
  DEVICE static int last_unit(int tiles) {
    const int units = count_units(tiles);
    return TILE * (unit_start(units) - unit_start(units - 1)) + ITEM_END;
  }
};

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

// Shares of a context, each of as many whole work items as there is room for in `most`: few thread blocks come to the end much later
// than others, though long work items are as long as some shares.
struct EqualShares : ContextCost {
  int most;  // a cost, no less than the longest work item's
  // The first share that begins among work items of each length, where it does, and how far the one before would go with all its room.
  int first[LENGTHS], from[LENGTHS], from_tile[LENGTHS], reach[LENGTHS];
  int units[LENGTHS];  // of a share
  float by[LENGTHS];   // reciprocals of what these take

  // Without branches, as lanes try different numbers and would take all of them one after another.
  DEVICE explicit EqualShares(int most_) : most(most_) {
#pragma unroll
    for (int i = 0; i < LENGTHS; ++i) units[i] = max(most / unit(i), 1), by[i] = reciprocal(units[i] * unit(i));
    first[0] = from[0] = from_tile[0] = reach[0] = 0;
#pragma unroll
    for (int i = 0; i + 1 < LENGTHS; ++i) {
      const int end = before(i + 1), times = shares_before(i, end), its_reach = from[i] + times * (units[i] * unit(i)) + most;
      const bool is_behind = from[i] >= end;
      int its_from = 0, tile = 0;  // of the last work item that does not begin behind that
#pragma unroll
      for (int k = i; k < LENGTHS; ++k) {
        const int nth = (its_reach - before(k)) / unit(k);
        if (k == i || its_reach >= before(k)) its_from = before(k) + nth * unit(k), tile = first_tile(k) + nth * (UNIT << k);
      }
      first[i + 1] = is_behind ? first[i] : first[i] + times + 1, reach[i + 1] = is_behind ? reach[i] : its_reach;
      from[i + 1] = is_behind ? from[i] : its_from, from_tile[i + 1] = is_behind ? from_tile[i] : tile;
    }
  }
  // Of a context that takes so much.
  DEVICE int count(int end) const {
    int its = 1 + shares_before(0, end);
#pragma unroll
    for (int i = 1; i < LENGTHS; ++i) its = end > reach[i] ? first[i] + 1 + shares_before(i, end) : its;
    return its;
  }
  // In tiles.
  DEVICE int begin(int nth) const {
    int its = nth * units[0] * UNIT;
#pragma unroll
    for (int i = 1; i < LENGTHS; ++i) its = nth >= first[i] ? from_tile[i] + (nth - first[i]) * (units[i] * (UNIT << i)) : its;
    return its;
  }

 private:
  // Where work items of a length begin.
  DEVICE static constexpr int first_tile(int i) { return i == 0 ? 0 : 16 * UNIT << (i - 1); }
  // Of those that begin among work items of a length, how many end before `end` whatever they have.
  DEVICE int shares_before(int i, int end) const {
    return divide_up(max(end - most - from[i], 0), units[i] * unit(i), by[i]);
  }
};

// Tiles [begin, end) of a thread block. Costs in half tiles: the end of a work item takes about as long as half a tile.
struct Share : Costs<3, 1, 1> {
  int begin, end, first_unit;

  // Where share `nth` of `count` begins, of `tiles` of a context: where a work item does. Where these are long, EqualShares says that.
  // What follows the tiles, of trees, is the last share's, and takes as long as `more` tiles. Shares of longer chains take about as
  // long, but none has more tiles than if all had as many: work items of the most tiles cannot be divided.
  DEVICE static int border(int tiles, int more, int nth, int count) {
    const int last = count_units(tiles + 1) - 1;
    if (nth == count) return tiles;
    if (TREE || tiles <= count * MOST_UNIT) return unit_start(min(count_units((tiles + more) * nth / count + 1) - 1, last));
    const int most = round_up((tiles + count - 1) / count);
    const int from_end = min(round_up(tiles) - (count - nth) * most, unit_start(last));
    return max(unit_start(min(unit_behind(cost(tiles) * nth / count), last)), from_end);
  }
};

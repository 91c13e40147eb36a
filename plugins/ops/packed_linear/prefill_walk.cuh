// The tiles of a step of the kernel for many tokens, and which of them a thread block computes.
//
// Macros: WARPGROUPS (that multiply), WG_TILES, TILE_TOKENS, and EVEN (1: all thread blocks have equal shares of K).
#pragma once

constexpr int INTERVAL = INPUT_TYPE::bytes == 1 ? 4 : 1;  // chunks between which row tiles alternate
constexpr int GROUP_TOKENS = 2048;  // token tiles that use the weights at the same time

// The tiles of a step (`unit`: the number of one).
struct Work {
  int row_tiles, chunks, tokens;

  DEVICE int row_blocks() const {
    return (row_tiles + WARPGROUPS * WG_TILES - 1) / (WARPGROUPS * WG_TILES);
  }
  DEVICE int token_tiles() const { return (tokens + TILE_TOKENS - 1) / TILE_TOKENS; }
  DEVICE int units() const { return row_blocks() * token_tiles(); }
  // Units that run at the same time share weights; a group of token tiles iterates over all weights.
  DEVICE void at(int unit, int& row_block, int& token) const {
    constexpr int GROUP = GROUP_TOKENS / TILE_TOKENS;
    const int group = unit / (GROUP * row_blocks()), start = group * GROUP;
    const int width = min(GROUP, token_tiles() - start), rest = unit - start * row_blocks();
    row_block = rest / width;
    token = (start + rest % width) * TILE_TOKENS;
  }
  DEVICE int token(int unit) const {
    int row_block, first_token;
    at(unit, row_block, first_token);
    return first_token;
  }
};

// What a block computes, piece by piece: chunks [first, last) of a unit.
#if EVEN

// Every block has as many intervals of K as the others, of adjacent row blocks and one token tile, so the first and the
// last unit may be shared with a neighbour. It starts with the beginning of the last one and leaves those sums to
// the next block, which computes the rest of that unit last and so need not wait for them.
struct Walk {
  int unit, first, last;
  int nth;  // piece: -1 the beginning of unit `end`, 0 ... whole units, end - begin the rest of the unit before
  int begin, end, begin_chunk, end_chunk;  // row blocks; chunks of the one before `begin`, and of `end`
  int chunks, tiles;

  DEVICE explicit Walk(const Work& work) : chunks(work.chunks), tiles(work.token_tiles()) {
    const int intervals = (chunks + INTERVAL - 1) / INTERVAL;
    const u32 all = work.row_blocks() * intervals, share = blockIdx.x / tiles, shares = gridDim.x / tiles;
    const int from = share * all / shares, to = (share + 1) * all / shares;
    begin = (from + intervals - 1) / intervals, begin_chunk = from % intervals * INTERVAL;
    end = to / intervals, end_chunk = to % intervals * INTERVAL;
    nth = end_chunk > 0 ? -1 : 0;
    place();
  }
  DEVICE bool done() const { return nth + (begin_chunk == 0) > end - begin; }
  DEVICE void next() {
    ++nth;
    place();
  }
  DEVICE void place() {
    const int row_block = nth < 0 ? end : nth < end - begin ? begin + nth : begin - 1;
    unit = row_block * tiles + blockIdx.x % tiles;
    first = row_block < begin ? begin_chunk : 0;
    last = nth < 0 ? end_chunk : chunks;
  }
};

#else

struct Walk {
  static constexpr int first = 0;
  const int last, units;
  int unit;

  DEVICE explicit Walk(const Work& work)
      : last(work.chunks), units(work.units()), unit(blockIdx.x) {}
  DEVICE bool done() const { return unit >= units; }
  DEVICE void next() { unit += gridDim.x; }
};

#endif

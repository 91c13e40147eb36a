"""Which tiles and parts of K the thread blocks of prefill.cu compute, by its own code as C++."""

from __future__ import annotations

import ctypes
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from llmctl.plugins.backends.cpu.compile import find_compiler
from llmctl.plugins.backends.cuda.compiler import PLUGINS
from llmctl.plugins.ops.packed_linear.prefill import (
    EVEN_NARROW,
    EVEN_SQUARE,
    EVEN_THIN,
    SQUARE,
    THIN,
    WIDE,
    Variant,
)

NUM_SMS, INTERVAL = 132, 4
SOURCE = """
#include <algorithm>
using std::min;
typedef unsigned u32;
#define DEVICE inline
struct Bytes { static constexpr int bytes = 1; };
typedef Bytes INPUT_TYPE;
struct { u32 x; } blockIdx, gridDim;
#include "ops/packed_linear/prefill_walk.cuh"

extern "C" int pieces(int row_tiles, int chunks, int tokens, int blocks, int block,
                      int (*found)[3]) {
  gridDim.x = blocks, blockIdx.x = block;
  const Work work{row_tiles, chunks, tokens};
  int count = 0;
  for (Walk walk(work); !walk.done(); walk.next(), ++count) {
    found[count][0] = walk.unit, found[count][1] = walk.first, found[count][2] = walk.last;
  }
  return count;
}
extern "C" int units(int row_tiles, int chunks, int tokens) {
  return Work{row_tiles, chunks, tokens}.units();
}
"""


class Piece(NamedTuple):
    """Chunks [first, last) of a tile, which a block computes as its nth of `count` pieces."""

    unit: int
    first: int
    last: int
    block: int
    nth: int
    count: int


@cache
def library(variant: Variant, folder: Path) -> ctypes.CDLL:
    source, binary = folder / f"{variant.name}.cpp", folder / f"{variant.name}.so"
    source.write_text(SOURCE)
    macros = {
        "WARPGROUPS": variant.warpgroups,
        "WG_TILES": variant.wg_tiles,
        "TILE_TOKENS": variant.tokens,
        "EVEN": int(variant.is_even),
    }
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{PLUGINS}"]
    subprocess.run([*find_compiler(), *flags, *defined, str(source), "-o", str(binary)], check=True)
    return ctypes.CDLL(str(binary))


def all_pieces(
    variant: Variant, folder: Path, row_tiles: int, chunks: int, tokens: int, blocks: int
) -> list[Piece]:
    found, pieces = library(variant, folder), []
    for block in range(blocks):
        rows = ((ctypes.c_int * 3) * 4096)()
        count = found.pieces(row_tiles, chunks, tokens, blocks, block, rows)
        pieces += [Piece(*rows[nth], block, nth, count) for nth in range(count)]
    return pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk")


@pytest.mark.parametrize("chunks", [1, 5, 32])
@pytest.mark.parametrize("row_tiles", [7, 96, 161])
@pytest.mark.parametrize("tokens", [65, 300, 900])
@pytest.mark.parametrize(
    "variant", [SQUARE, WIDE, THIN, EVEN_SQUARE, EVEN_NARROW, EVEN_THIN], ids=lambda v: v.name
)
def test_every_chunk_of_every_tile_is_computed_once(variant, tokens, row_tiles, chunks, folder):
    token_tiles = -(-tokens // variant.tokens)
    row_blocks = -(-row_tiles * 64 // variant.rows)
    shares = min(NUM_SMS // token_tiles, row_blocks)
    blocks = token_tiles * (shares if variant.is_even else min(shares * 2, row_blocks))
    by_unit = defaultdict(list)
    for piece in all_pieces(variant, folder, row_tiles, chunks, tokens, blocks):
        by_unit[piece.unit].append(piece)
    wanted = library(variant, folder).units(row_tiles, chunks, tokens)
    assert sorted(by_unit) == list(range(wanted)) and wanted == row_blocks * token_tiles
    for its in by_unit.values():
        its.sort(key=lambda piece: piece.first)
        assert [piece.first for piece in its] == [0, *(piece.last for piece in its[:-1])]
        assert its[-1].last == chunks
        assert len(its) == 1 or variant.is_even


@pytest.mark.parametrize("chunks", [1, 5, 32, 112])
@pytest.mark.parametrize("row_tiles", [161, 450])
@pytest.mark.parametrize("tokens", [129, 300, 900])
def test_shares_are_equal_and_nobody_waits_for_who_has_not_begun(tokens, row_tiles, chunks, folder):
    variant = EVEN_SQUARE
    token_tiles = -(-tokens // variant.tokens)
    blocks = token_tiles * min(NUM_SMS // token_tiles, -(-row_tiles * 64 // variant.rows))
    work: dict[int, int] = defaultdict(int)
    by_unit = defaultdict(list)
    for piece in all_pieces(variant, folder, row_tiles, chunks, tokens, blocks):
        assert piece.unit % token_tiles == piece.block % token_tiles
        work[piece.block] += -(-(piece.last - piece.first) // INTERVAL)
        by_unit[piece.unit].append(piece)
    assert max(work.values()) - min(work.values()) <= 1
    shared = [sorted(its, key=lambda piece: piece.first) for its in by_unit.values() if its[1:]]
    for its in shared:
        beginning, rest = its
        assert beginning.nth == 0 and beginning.last % INTERVAL == 0
        assert rest.nth == rest.count - 1 > 0
        assert rest.block == beginning.block + token_tiles
    assert shared or chunks <= INTERVAL or blocks == len(by_unit)

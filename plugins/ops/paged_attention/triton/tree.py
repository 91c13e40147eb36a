"""Attention of trees of tokens, with the bits of plain decoding.

Decoding a path token by token adds its keys in order of position, in tiles at fixed positions. In a
tree the keys of a path are scattered after the root, so a mask over tiles of the cache would add
the same numbers in different tiles: equal as real numbers, but not bit for bit. Here the tiles that
extend past the root are gathered for each token separately, along its path, and leave the states of
the other tokens unchanged. Tiles before the root are shared by all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.paged_attention.triton.state import attend, sees, widen
from llmctl.plugins.ops.paged_attention.triton.tiles import KEYS, keys_of, load_keys


@triton.jit
def tree_of(tree_start, tree_root, request, limit):
    """(the root's position, its row of the paths); where the request has no tree, no key lies
    behind the root."""
    row = tl.load(tree_start + request)
    root = tl.load(tree_root + request, mask=row >= 0, other=limit)
    return root, tl.maximum(row, 0).to(tl.int64)


@triton.jit
def attend_paths(
    queries,
    keys_base,
    table,
    tile,
    loaded,
    position,
    token,
    first_token,
    num_tokens,
    root,
    paths,
    path_stride,
    largest,
    total,
    acc,
    scale,
    limit,
    reach,
    sinks,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
):
    """Take one tile into a unit's state: once, or token by token where it reaches behind the root.

    `position` and `token` are those of the rows, num_tokens tokens from first_token on."""
    key = keys_of(tile)
    is_shared = (tile + 1) * KEYS <= root
    for nth in tl.range(0, tl.where(is_shared, 1, num_tokens)):
        own = first_token + nth
        # Rows of other tokens see nothing. What rows see is found anew each time: as a mask that
        # lives through the loop it would take 32 registers.
        looking = tl.where((token == own) | is_shared, position, -1)
        is_there = (key < loaded) & (key <= tl.max(looking, axis=0))
        on_path = is_there & (key >= root)
        step = tl.load(paths + own * path_stride + (key - root), mask=on_path, other=0)
        place = tl.where(key >= root, root + step, key)
        pages = tl.load(table + place // TOKENS_PER_BLOCK, mask=is_there, other=0)
        k, v = load_keys(keys_base, pages, place, is_there, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        largest, total, acc = attend(
            queries,
            widen(k, INNER),
            widen(v, INNER),
            sees(key, looking, limit, reach, sinks, HAS_WINDOW, HAS_SINKS),
            largest,
            total,
            acc,
            scale,
            True,
        )
    return largest, total, acc

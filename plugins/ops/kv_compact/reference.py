"""After a tree was verified, the keys of the accepted path lie where its tokens were in the tree.

A move is a pair of slots (block * tokens_per_block + offset) of one request: from, to. All moves
of a path may be done at once or one after the other: what a move overwrites is read by it or by
those before it alone (a path's tokens come in order, and none lies in front of its place).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def compact(kv_cache: torch.Tensor, moves: Iterable[tuple[int, int]]) -> None:
    """Copy keys and values of all layers and heads, for each move (from, to).

    kv_cache: [num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size], any dtype.
    """
    pairs = torch.tensor(list(moves), dtype=torch.int64).view(-1, 2)
    blocks = torch.div(pairs, kv_cache.shape[4], rounding_mode="floor")
    offsets = pairs % kv_cache.shape[4]
    cache = kv_cache.view(torch.uint8)  # indexing knows no 8-bit floats
    cache[:, blocks[:, 1], :, :, offsets[:, 1]] = cache[:, blocks[:, 0], :, :, offsets[:, 0]]

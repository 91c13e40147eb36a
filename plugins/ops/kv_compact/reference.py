"""Moves the keys of an accepted path: after the verification of a tree they are where its tokens
were in the tree.

A move is a pair of slots (block * tokens_per_block + offset) of one request: from, to. All moves of
a path may be done at once or one after another: what a move overwrites is read only by itself or by
moves before it (a path's tokens are in order, and none is stored before its final place).
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

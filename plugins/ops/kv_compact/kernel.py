"""The launch that moves keys and values of accepted paths on a GPU."""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch

_MOVES = 16  # that a thread block has under way at once


def kernels(num_kv_heads: int, tokens_per_block: int, token_bytes: int) -> list[KernelSpec]:
    """The one binary of a cache whose heads have keys of so many bytes a token."""
    return [_spec(num_kv_heads, tokens_per_block, token_bytes)]


def compact_launch(kv_cache: torch.Tensor, starts: torch.Tensor, moves: torch.Tensor) -> Launch:
    """Move keys and values in all layers of `kv_cache` (its shape is as in reference.py).

    starts: int32 [R + 1], prefix sums of moves per request; moves: int32 [M, 2], slots from and to.
    """
    layers, blocks, _, heads, tokens_per_block, size = kv_cache.shape
    token_bytes = size * kv_cache.element_size()
    words = kv_cache.view(torch.uint8).view(torch.int32)
    return Launch(
        _spec(heads, tokens_per_block, token_bytes),
        (layers * 2 * heads, len(starts) - 1, 1),
        (words, starts, moves, blocks),
    )


def _spec(heads: int, tokens_per_block: int, token_bytes: int) -> KernelSpec:
    words = token_bytes // 4
    return KernelSpec(
        name=f"kv_compact.h{heads}.page{tokens_per_block}.w{words}",
        source="llmctl.plugins.ops.kv_compact.triton_kernel:compact",
        arguments=("*i32", "*i32", "*i32", "i32"),
        constants={
            "HEADS": heads,
            "TOKENS_PER_BLOCK": tokens_per_block,
            "WORDS": words,
            "WIDTH": 1 << (words - 1).bit_length(),
            "MOVES": _MOVES,
            "PDL": True,
        },
        num_warps=4,
    )

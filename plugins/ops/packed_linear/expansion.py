"""4-bit weights expanded to FP8 weights in scratch memory, for products with many tokens: the
binary and launch of `expand.cu`, and the call that multiplies the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.ops.packed_linear.forms import CHUNK_BYTES, TILE_ROWS

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
_HALVES = 2  # FP8 blocks that one 4-bit block becomes


def expanded_call(call: OpCall, allocate: Allocate) -> OpCall:
    """The same product with its weight in FP8, in memory of `allocate` (see LaunchEnv.scratch) that
    all weights of this size share: a step multiplies them one after the other."""
    tiles, chunks = call.inputs["weight"].shape[:2]
    shape = (tiles, _HALVES * chunks, TILE_ROWS, CHUNK_BYTES)
    name = f"packed_linear.expanded.{tiles}x{chunks}"
    return replace(
        call, inputs={**call.inputs, "weight": allocate(name, shape, torch.float8_e4m3fn)}
    )


def expand_spec() -> KernelSpec:
    """The binary, one for all weights."""
    return KernelSpec(
        name="packed_linear.expand",
        source="ops/packed_linear/expand.cu",
        arguments=(pointer(torch.uint8), pointer(torch.float8_e4m3fn)),
        entry="expand",
    )


def expand_launch(call: OpCall, expanded: OpCall) -> Launch:
    """Write the weight of `expanded` from that of `call`."""
    weight = call.inputs["weight"]
    tiles, chunks = weight.shape[:2]
    return Launch(expand_spec(), (chunks, tiles, 1), (weight, expanded.inputs["weight"]))

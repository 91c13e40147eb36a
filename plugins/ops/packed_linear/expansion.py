"""Codes expanded to FP8 weights in scratch memory, for products with many tokens: the binary and
launch that do so, and the call that multiplies the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.forms import CHUNK_BYTES, TILE_ROWS

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


def expanded_call(call: OpCall, allocate: Allocate) -> OpCall:
    """The same product with its weight in FP8, in memory of `allocate` (see LaunchEnv.scratch) that
    all weights of this size share: a step multiplies them one after the other."""
    tiles, chunks = call.inputs["weight"].shape[:2]
    form = form_of(call)
    shape = (tiles, form.token_chunks * chunks, TILE_ROWS, CHUNK_BYTES)
    name = f"packed_linear.expanded.{tiles}x{chunks}"
    inputs = {**call.inputs, "weight": allocate(name, shape, torch.float8_e4m3fn)}
    attributes = {k: v for k, v in call.attributes.items() if k not in form.attributes}
    return replace(call, inputs=inputs, attributes=attributes)


def expand_spec(call: OpCall) -> KernelSpec:
    """The binary, one for all weights of the call's form."""
    source = form_of(call).expansion
    return KernelSpec(
        name=f"packed_linear.{PurePath(source).stem}",
        source=source,
        arguments=(pointer(call.inputs["weight"].dtype), pointer(torch.float8_e4m3fn)),
        entry="expand",
    )


def expand_launch(call: OpCall, expanded: OpCall) -> Launch:
    """Write the weight of `expanded` from that of `call`."""
    weight = call.inputs["weight"]
    tiles, chunks = weight.shape[:2]
    return Launch(expand_spec(call), (chunks, tiles, 1), (weight, expanded.inputs["weight"]))

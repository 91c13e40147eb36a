"""Prompts' attention with FP8 products: binaries, launches of images_fp8.cu and chunk_fp8.cu.

Engines have them where `--use_fp8_context_fmha` asks for them (fp8_context.py says for which
tokens); reference.py has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.chunk.chunk import (
    MOST_REQUESTS,
    ROWS,
    WARPGROUPS,
    covers_chunks,
    request_room,
)
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import (
    KEYS,
    MOST_UNIT,
    RAISE,
    WEIGHT_POWER,
)
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    source_variant,
    tensor_types,
)

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

_IMAGE_BYTES = 128 << 20  # for operands of an engine, or as many as one head of a context takes
_IMAGE_BLOCKS = 4  # thread blocks a multiprocessor
_Arguments: TypeAlias = "tuple[torch.Tensor | int | float, ...]"
_OWN = {"FP8_PRODUCTS": 1, "TILE_KEYS": KEYS, "MOST_UNIT": MOST_UNIT}


def has_fp8_context(call: OpCall) -> bool:
    """Whether some tokens of prompts have FP8 products."""
    return bool(call.attributes.get("fp8_context", False))


def fp8_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """What steps of an engine with FP8 products need; Unsupported where that cannot be computed."""
    if not has_fp8_context(call):
        return []
    if limits.kv_dtype != FP8 or not covers_chunks(call, limits):
        raise Unsupported(
            f"{call.name}: no kernel multiplies as FP8 numbers with a cache of {limits.kv_dtype}, "
            f"head size {call.attributes['head_size']}, a window of {call.attributes['window']}, "
            f"{limits.tokens_per_block} tokens per block and {limits.max_batch_size} requests; "
            f"wanted {FP8}, 128, 0, a power of two and at most {MOST_REQUESTS}",
            fix="build with --use_fp8_context_fmha disable",
        )
    return [images_fp8_spec(call, limits), chunk_fp8_spec(call, limits)]


def fp8_launches(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    counters: torch.Tensor,
    logit_scale: float,
    min_tokens: int,
) -> list[Launch]:
    """Attend for tokens before their requests' `context_end`, of requests of at least min_tokens
    tokens; the other arguments are those of `chunk_launches`.

    All keys become operands before, of as many heads and requests at a time as there is room for.
    """
    limits, requests = env.limits, shape.num_requests
    # Asked for in every step, so that the memory plan, which looks at the largest, knows of it.
    name = f"paged_attention.images_fp8.h{call.attributes['num_kv_heads']}"
    room = env.scratch(name, (_image_bytes(call, limits),), torch.uint8)
    numbers = (env.step.block_tables.stride(0), requests, min_tokens)
    ends = env.step.context_end
    tiles = -(-shape.max_kv_len // KEYS)
    found = []
    for *heads, first_chunk, num_chunks in _turns(call, limits, shape):
        turn = (tiles, *heads, first_chunk, num_chunks)
        written: _Arguments = (*tensors[5:], ends, room, *numbers, *turn)
        grid = (_IMAGE_BLOCKS * limits.num_sms, 1, 1)
        found.append(Launch(images_fp8_spec(call, limits), grid, written))
        blocks = shape.num_tokens // (ROWS // group_size(call)) + num_chunks  # or fewer
        grid = (min(blocks * heads[1], limits.num_sms), 1, 1)
        read: _Arguments = (*tensors, ends, counters, logit_scale, *numbers, room, *turn)
        found.append(Launch(chunk_fp8_spec(call, limits), grid, read))
    return found


def _turns(
    call: OpCall, limits: StepLimits, shape: StepShape
) -> Iterator[tuple[int, int, int, int]]:
    """First head, heads, first chunk and chunks of each pair of launches."""
    heads = int(call.attributes["num_kv_heads"])
    # A request with FP8 products has a group of tokens at least.
    chunks = min(shape.num_requests, shape.num_tokens // GROUP)
    places = _image_bytes(call, limits) // (-(-shape.max_kv_len // KEYS) * _tile_bytes(call))
    heads_at_once, chunks_at_once = min(heads, places), max(places // heads, 1)
    for chunk in range(0, chunks, chunks_at_once):
        for head in range(0, heads, heads_at_once):
            count = min(heads_at_once, heads - head)
            yield head, count, chunk, min(chunks_at_once, chunks - chunk)


def _tile_bytes(call: OpCall) -> int:
    """Of a tile's keys and values of one head as operands."""
    return 2 * KEYS * int(call.attributes["head_size"])


def _image_bytes(call: OpCall, limits: StepLimits) -> int:
    """Room for operands: at least for one head of the longest context."""
    a_head = -(-limits.max_seq_len // KEYS) * _tile_bytes(call)
    chunks = max(limits.max_num_tokens // GROUP, 1)
    wanted = int(call.attributes["num_kv_heads"]) * chunks * a_head
    return max(min(_IMAGE_BYTES, wanted), a_head)


def images_fp8_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The binary of images_fp8.cu."""
    words, constants = source_variant(call, limits)
    return KernelSpec(
        name=".".join(["paged_attention.images_fp8", *words]),
        source="ops/paged_attention/chunk_fp8/images_fp8.cu",
        arguments=(pointer(limits.kv_dtype), *["*i32"] * 5, "*u8", *["i32"] * 8),
        constants=constants | _OWN,
        entry="images_fp8",
        num_warps=4,
    )


def chunk_fp8_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The binary of chunk_fp8.cu."""
    size = int(call.attributes["head_size"])
    words, constants = source_variant(call, limits)
    requests, request_bytes = request_room(limits)
    # Keys, values with eight more dimensions, and their barriers; what is merged of all rows.
    stage_bytes = KEYS * (2 * size + 8) + 4 * 8
    fixed_bytes = ROWS * size * 4 + request_bytes
    stages = (HOPPER.max_shared_bytes - fixed_bytes) // stage_bytes
    return KernelSpec(
        name=".".join(["paged_attention.chunk_fp8", *words, f"b{requests}"]),
        source="ops/paged_attention/chunk_fp8/chunk_fp8.cu",
        arguments=(
            *tensor_types(call, limits),
            *("*i32", "*i32", "fp32", *["i32"] * 3),
            *("*u8", *["i32"] * 5),
        ),
        constants=constants
        | _OWN
        | {
            "STAGES": stages,
            "WARPGROUPS": WARPGROUPS,
            "RAISE": f"{RAISE}f",
            "WEIGHT_POWER": f"{WEIGHT_POWER}f",
        },
        entry="chunk_fp8",
        num_warps=4 + ROWS // 16,
        shared_bytes=fixed_bytes + stages * stage_bytes,
    )

"""Prompts' attention with FP8 products: binaries, launches of images_fp8.cu and chunk_fp8.cu.

Engines have them where `--use_fp8_context_fmha` asks for them (fp8_context.py says for which
tokens); reference.py has the arithmetic. With `--use_fp8_generation_fmha` they compute all tokens
of requests of more than a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import (
    Constant,
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.chunk.chunk import (
    MOST_REQUESTS as CHUNK_REQUESTS,
)
from llmctl.plugins.ops.paged_attention.chunk.chunk import (
    ROWS,
    WARPGROUPS,
    covers_chunks,
    kept_tokens,
    request_room,
)
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import (
    CHAIN,
    KEYS,
    MOST_UNIT,
    RAISE,
    UNIT,
    WEIGHT_POWER,
)
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    SHORT,
    group_size,
    source_variant,
    tensor_types,
)

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

MOST_REQUESTS = 1024  # of engines with two levels: 16 bytes each; leaves room for two tiles
_IMAGE_BYTES = 128 << 20  # for operands of an engine, or as many as one head of a context takes
_IMAGE_BLOCKS = 4  # thread blocks a multiprocessor
_Arguments: TypeAlias = "tuple[torch.Tensor | int | float, ...]"
_OWN = {"FP8_PRODUCTS": 1, "TILE_KEYS": KEYS}


def is_read(call: OpCall) -> bool:
    """Whether anything reads what tokens with FP8 products give: of the last layer only tokens that
    get logits are read, and those are behind `context_end` where prompts alone have such products,
    as the last token of a prompt is."""
    is_last = bool(call.attributes.get("ends_only", False))
    return not is_last or fp8_tokens(call.attributes) is Fp8Tokens.ALL


def fp8_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """What steps of an engine with FP8 products need; Unsupported where that cannot be computed."""
    if fp8_tokens(call.attributes) is Fp8Tokens.NONE:
        return []
    is_all = fp8_tokens(call.attributes) is Fp8Tokens.ALL
    fits = not is_all or limits.max_batch_size <= MOST_REQUESTS
    if limits.kv_dtype != FP8 or not fits or not covers_chunks(call, limits):
        raise Unsupported(
            f"{call.name}: no kernel multiplies as FP8 numbers with a cache of {limits.kv_dtype}, "
            f"head size {call.attributes['head_size']}, a window of {call.attributes['window']}, "
            f"{limits.tokens_per_block} tokens per block and {limits.max_batch_size} requests; "
            f"wanted {FP8}, 128, 0, a power of two and at most "
            f"{MOST_REQUESTS if is_all else CHUNK_REQUESTS}",
            fix="build with --use_fp8_context_fmha disable",
        )
    return [images_fp8_spec(call, limits), chunk_fp8_spec(call, limits)] if is_read(call) else []


def fp8_launches(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    counters: torch.Tensor,
    logit_scale: float,
    min_tokens: int,
) -> list[Launch]:
    """Attend for tokens before their requests' `context_end`, or for all, of requests of at least
    min_tokens tokens; the other arguments are those of `chunk_launches`.

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
    for *heads, first_chunk, num_chunks in _turns(call, limits, shape, min_tokens):
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
    call: OpCall, limits: StepLimits, shape: StepShape, min_tokens: int
) -> Iterator[tuple[int, int, int, int]]:
    """First head, heads, first chunk and chunks of each pair of launches."""
    heads = int(call.attributes["num_kv_heads"])
    requests = shape.num_requests - (shape.num_short if min_tokens > 1 else 0)
    chunks = _most_chunks(call, requests, shape.num_tokens, min_tokens)
    places = _image_bytes(call, limits) // (-(-shape.max_kv_len // KEYS) * _tile_bytes(call))
    heads_at_once, chunks_at_once = min(heads, places), max(places // heads, 1)
    for chunk in range(0, chunks, chunks_at_once):
        for head in range(0, heads, heads_at_once):
            count = min(heads_at_once, heads - head)
            yield head, count, chunk, min(chunks_at_once, chunks - chunk)


def _most_chunks(call: OpCall, requests: int, tokens: int, min_tokens: int) -> int:
    """How many of the requests with so many tokens in all may have some with FP8 products."""
    # Of a prompt a whole group at least.
    return min(requests, tokens // (fp8_tokens(call.attributes).group or min_tokens))


def _tile_bytes(call: OpCall) -> int:
    """Of a tile's keys and values of one head as operands."""
    return 2 * KEYS * int(call.attributes["head_size"])


def _image_bytes(call: OpCall, limits: StepLimits) -> int:
    """Room for operands: at least for one head of the longest context."""
    a_head = -(-limits.max_seq_len // KEYS) * _tile_bytes(call)
    most = _most_chunks(call, limits.max_batch_size, limits.max_num_tokens, SHORT + 1)
    wanted = int(call.attributes["num_kv_heads"]) * max(most, 1) * a_head
    return max(min(_IMAGE_BYTES, wanted), a_head)


def _variant(call: OpCall, limits: StepLimits) -> tuple[list[str], dict[str, Constant]]:
    """What tells binaries of one source apart: the parts of a name, and the macros."""
    words, constants = source_variant(call, limits)
    if fp8_tokens(call.attributes) is Fp8Tokens.ALL:
        units = {"UNIT": UNIT, "MOST_UNIT": MOST_UNIT}
        return ["all", *words], constants | _OWN | units | {"EVERY_TOKEN": 1}
    return words, constants | _OWN | {"UNIT": CHAIN, "MOST_UNIT": CHAIN}  # nobody stores any


def images_fp8_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The binary of images_fp8.cu."""
    words, constants = _variant(call, limits)
    return KernelSpec(
        name=".".join(["paged_attention.images_fp8", *words]),
        source="ops/paged_attention/chunk_fp8/images_fp8.cu",
        arguments=(pointer(limits.kv_dtype), *["*i32"] * 5, "*u8", *["i32"] * 8),
        constants=constants,
        entry="images_fp8",
        num_warps=4,
    )


def chunk_fp8_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The binary of chunk_fp8.cu."""
    size = int(call.attributes["head_size"])
    words, constants = _variant(call, limits)
    requests, request_bytes = request_room(limits)
    is_all = fp8_tokens(call.attributes) is Fp8Tokens.ALL
    ends = kept_tokens(call, limits) if is_all else 0  # else tokens that get logits are chunk.cu's
    words = [f"ends{ends}"] * (ends > 0) + words
    # Keys, values with eight more dimensions, and their barriers; what is merged of all rows: of
    # work items, and of chains where those have several, sums and four numbers more for each of a
    # row's four threads.
    stage_bytes = KEYS * (2 * size + 8) + 4 * 8
    fixed_bytes = (1 + is_all) * ROWS * (size + 8) * 4 + request_bytes
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
        | {
            "STAGES": stages,
            "WARPGROUPS": WARPGROUPS,
            "CHAIN": CHAIN,
            "RAISE": f"{RAISE}f",
            "WEIGHT_POWER": f"{WEIGHT_POWER}f",
        }
        | ({"ENDS": ends} if ends else {}),
        entry="chunk_fp8",
        num_warps=4 + ROWS // 16,
        shared_bytes=fixed_bytes + stages * stage_bytes,
    )

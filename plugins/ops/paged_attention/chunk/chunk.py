"""The kernel for context chunks: binaries and launches of `chunk.cu`.

It gives the bits of the Triton context kernel, which is used for what it does not support: windows,
token trees, INT8 caches, page sizes that are no power of two, and head sizes 80, 96 and 64 (where
it is no faster).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.paged_attention.generation.generation import covers
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

WARPGROUPS = 2  # one tensor-core instruction high each
ROWS = 64 * WARPGROUPS  # of an item
_MOST_STAGES = 6  # tiles of keys, and of values, on their way
# Tiles are converted by a kernel of their own from contexts of so many tokens on, if so many
# blocks of rows read each of them.
_LONG, _MANY_BLOCKS = 2048, 16
_IMAGE_BYTES = 128 << 20  # at most, for converted tiles of an engine
_IMAGE_BLOCKS = 8  # thread blocks a multiprocessor
_MIN_REQUESTS = 64  # fewer do not make another binary
MOST_REQUESTS = 4096  # 16 bytes each; leaves room for three tiles


def covers_chunks(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call for requests of any length."""
    is_wide = int(call.attributes["head_size"]) == 128
    return is_wide and limits.max_batch_size <= MOST_REQUESTS and covers(call, limits)


def chunk_launches(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    counters: torch.Tensor,
    logit_scale: float,
    min_tokens: int,
) -> list[Launch]:
    """Attend for requests of at least min_tokens tokens.

    counters: the first counts items that were taken; zero before and after. In an engine whose
    prompts have FP8 products tokens before their `context_end` are left out; few are left then, so
    their tiles are not converted before.
    """
    all_heads, requests = int(call.attributes["num_kv_heads"]), shape.num_requests
    blocks = shape.num_tokens // (ROWS // group_size(call)) + requests  # or fewer
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        counters,
        logit_scale,
        env.step.block_tables.stride(0),
        requests,
        min_tokens,
    )
    if _has_fp8_prompts(call):
        limits = env.limits
        grid = (min(blocks * all_heads, limits.num_sms), 1, 1)
        # Device rounds have chains that are no prompts, and leave what a prompt's step said.
        nobody = env.scratch("paged_attention.no_context", (limits.max_batch_size,), torch.int32)
        ends = env.step.context_end if shape.max_query_len >= GROUP else nobody
        return [Launch(chunk_spec(call, limits), grid, (*arguments, ends))]
    # Asked for in every step, so that the memory plan, which looks at the largest, knows of it.
    name, room_bytes = f"paged_attention.images.h{all_heads}", _image_bytes(call, env.limits)
    room = env.scratch(name, (room_bytes,), torch.uint8)
    # Those of one token are no chunks, if min_tokens says so.
    chunks = requests - (shape.num_single if min_tokens > 1 else 0)
    heads = heads_at_once(call, env.limits, shape, chunks)
    if heads == 0:
        grid = (min(blocks * all_heads, env.limits.num_sms), 1, 1)
        return [Launch(chunk_spec(call, env.limits), grid, arguments)]
    tiles = -(-shape.max_kv_len // KEYS)
    found = []
    for first in range(0, all_heads, heads):
        count = min(heads, all_heads - first)
        written = (*tensors[5:6], *tensors[7:], room, *arguments[-3:], tiles, first, count)
        grid = (_IMAGE_BLOCKS * env.limits.num_sms, 1, 1)
        found.append(Launch(images_spec(call, env.limits), grid, written))
        grid = (min(blocks * count, env.limits.num_sms), 1, 1)
        read = (*arguments, room, tiles, first, count)
        found.append(Launch(chunk_spec(call, env.limits, by_images=True), grid, read))
    return found


def heads_at_once(call: OpCall, limits: StepLimits, shape: StepShape, chunks: int) -> int:
    """Of how many KV heads images.cu converts all tiles before they are attended to; none where
    that gains nothing or there is no room for so many chunks."""
    blocks = shape.num_tokens // (ROWS // group_size(call))
    if not chunks or shape.max_kv_len < _LONG or blocks < _MANY_BLOCKS:
        return 0
    a_head = chunks * -(-shape.max_kv_len // KEYS) * _tile_bytes(call)
    fitting = _image_bytes(call, limits) // a_head
    if fitting == 0:
        return 0
    heads = int(call.attributes["num_kv_heads"])
    turns = -(-heads // fitting)
    # Each turn is two launches, which short contexts do not repay.
    return -(-heads // turns) if shape.max_kv_len >= turns * _LONG else 0


def _tile_bytes(call: OpCall) -> int:
    """Of a tile's keys and values as operands."""
    return 2 * KEYS * int(call.attributes["head_size"]) * 2


def _image_bytes(call: OpCall, limits: StepLimits) -> int:
    """Room for converted tiles, none in engines whose steps never convert any."""
    if not _may_convert(call, limits):
        return 0
    heads = int(call.attributes["num_kv_heads"])
    return min(_IMAGE_BYTES, heads * -(-limits.max_seq_len // KEYS) * _tile_bytes(call))


def _may_convert(call: OpCall, limits: StepLimits) -> bool:
    blocks = limits.max_num_tokens // (ROWS // group_size(call))
    return limits.max_seq_len >= _LONG and blocks >= _MANY_BLOCKS


def images_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The binary of images.cu."""
    words, constants = source_variant(call, limits)
    return KernelSpec(
        name=".".join(["paged_attention.images", *words]),
        source="ops/paged_attention/chunk/images.cu",
        arguments=(pointer(limits.kv_dtype), *["*i32"] * 3, "*u8", *["i32"] * 6),
        constants=constants,
        entry="images",
        num_warps=4,
    )


def _has_fp8_prompts(call: OpCall) -> bool:
    """Whether some tokens are chunk_fp8.cu's. (Where all are, nothing is for this kernel.)"""
    return fp8_tokens(call.attributes) is Fp8Tokens.PROMPTS


def chunk_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """What steps may need."""
    found = [chunk_spec(call, limits)]
    if _may_convert(call, limits) and not _has_fp8_prompts(call):
        found += [images_spec(call, limits), chunk_spec(call, limits, by_images=True)]
    return found


def chunk_spec(call: OpCall, limits: StepLimits, *, by_images: bool = False) -> KernelSpec:
    """The binary of chunk.cu. by_images: for tiles that images.cu has converted."""
    size = int(call.attributes["head_size"])
    words, constants = source_variant(call, limits)
    requests, request_bytes = request_room(limits)
    operand_bytes = KEYS * size * 2
    stage_bytes = 2 * operand_bytes + 4 * 8  # keys and values, and their barriers
    fixed_bytes = 4 * operand_bytes + request_bytes  # queries of two items
    has_context = _has_fp8_prompts(call)
    ends = kept_tokens(call, limits)
    kinds = ["images"] * by_images + ["context"] * has_context + [f"ends{ends}"] * (ends > 0)
    stages = min((HOPPER.max_shared_bytes - fixed_bytes) // stage_bytes, _MOST_STAGES)
    return KernelSpec(
        name=".".join(["paged_attention.chunk", *kinds, *words, f"b{requests}"]),
        source="ops/paged_attention/chunk/chunk.cu",
        arguments=(
            *tensor_types(call, limits),
            *("*i32", "fp32", *["i32"] * 3),
            *(("*i32",) if has_context else ()),
            *(("*u8", *["i32"] * 3) if by_images else ()),
        ),
        constants=constants
        | {"STAGES": stages, "WARPGROUPS": WARPGROUPS, "IMAGES": by_images}
        | ({"HAS_CONTEXT": 1} if has_context else {})
        | ({"ENDS": ends} if ends else {}),
        entry="chunk",
        num_warps=4 + ROWS // 16,
        shared_bytes=fixed_bytes + stages * stage_bytes,
    )


def kept_tokens(call: OpCall, limits: StepLimits) -> int:
    """Of each request the last tokens that are computed, 0: all. Those that get logits are among
    them: the last one of a prompt, and every draft with its root."""
    if not call.attributes.get("ends_only", False):
        return 0
    tokens = ROWS // group_size(call)
    return -(-(limits.max_draft_len + 1) // tokens) * tokens


def request_room(limits: StepLimits) -> tuple[int, int]:
    """For how many requests a kernel for chunks has room, and the bytes of shared memory of two
    items, their barriers, the next item, the requests and one more."""
    requests = max(_MIN_REQUESTS, 1 << (limits.max_batch_size - 1).bit_length())
    return requests, 2 * 6 * 4 + 4 * 8 + 16 + 16 * (requests + 1)

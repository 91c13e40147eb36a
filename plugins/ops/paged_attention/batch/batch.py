"""The kernel for many requests of few tokens, or for long contexts: binaries and launches of
`batch.cu`.

It gives the bits of the other kernels, so a step may use any. It covers head sizes 64 and 128
without windows and trees, and requests with at most MAX_ROWS rows (tokens times query heads of one
KV head).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT, count_units

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

COLUMNS = (8, 16)  # of a tensor-core instruction, and two of them: rows of a request
MAX_ROWS = COLUMNS[-1]
# Keys and values in flight to a warp, bytes; at least three tiles of each. Four warps per
# multiprocessor then keep the memory busy. Of more requests eight do, with half as much each: more
# others hide what one waits for when it begins and ends.
_RING_BYTES = {4: 48 << 10, 8: 24 << 10}
_LEAST_TILES = 3  # of a ring
_WARPS_PER_SM, _MANY_WARPS_PER_SM = _RING_BYTES
FEW_GROUPS = 16  # of requests and KV heads: split over thread blocks that wait for each other
LONG = 4096  # tokens of a context beyond which it is divided as finely as there are warps


def covers_batch(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call for requests of one token."""
    page = limits.tokens_per_block
    return (
        int(call.attributes["head_size"]) in (64, 128)
        and int(call.attributes["window"]) == 0
        and page >= 8
        and page & (page - 1) == 0
        and group_size(call) <= MAX_ROWS
    )


def most_tokens(call: OpCall) -> int:
    """Tokens of a request, at most, in a step that holds context chunks: what one instruction's
    columns take, as most requests have one token there."""
    return max(COLUMNS[0] // group_size(call), 1)


def batch_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `batch_launch` may ask for in a step within the limits."""
    group, most = group_size(call), group_size(call) * most_short_tokens(limits)
    groups = limits.max_batch_size * int(call.attributes["num_kv_heads"])
    if groups <= FEW_GROUPS and limits.max_seq_len <= LONG:
        return []
    found = []
    for fewer, columns in pairwise((0, *COLUMNS)):
        if columns < group or most <= fewer:
            continue
        found.append(batch_spec(call, limits, columns))
        if limits.max_seq_len > LONG:
            found.append(batch_spec(call, limits, columns, together=True))
        if are_many(call, limits, columns, groups):
            found.append(batch_spec(call, limits, columns, _MANY_WARPS_PER_SM))
    return found


def are_many(call: OpCall, limits: StepLimits, columns: int, groups: int) -> bool:
    """Whether eight warps to a multiprocessor serve so many requests times KV heads: more than four
    would take at once, of few rows, and with tiles small enough for a ring of half the size."""
    has_room = _LEAST_TILES * _tile_bytes(call, limits) <= _RING_BYTES[_MANY_WARPS_PER_SM]
    return groups > _WARPS_PER_SM * limits.num_sms and columns == COLUMNS[0] and has_room


def _tile_bytes(call: OpCall, limits: StepLimits) -> int:
    """Of a tile's keys, or values."""
    return KEYS * int(call.attributes["head_size"]) * (1 if limits.kv_dtype in (FP8, "int8") else 2)


def batch_launch(
    call: OpCall,
    env: LaunchEnv,
    num_requests: int,
    max_tokens: int,
    max_kv_len: int,
    tensors: tuple[torch.Tensor, ...],
    partials: tuple[torch.Tensor, torch.Tensor],
    logit_scale: float,
) -> Launch:
    """Attend for requests of up to max_tokens tokens, which are at most MAX_ROWS rows.

    partials: room for the work items of all parts but the first, and a counter for each request and
    KV head, zero before and after. If there is no room for them, contexts are not divided into
    parts.
    """
    heads, size = int(call.attributes["num_kv_heads"]), int(call.attributes["head_size"])
    rows = max_tokens * group_size(call)
    columns = next(each for each in COLUMNS if each >= rows)
    tiles = -(-max_kv_len // KEYS)
    groups, num_sms = num_requests * heads, env.limits.num_sms
    part_tiles = _part_tiles(tiles, groups, num_sms)
    floats = columns // 8 * (size // 4 + 3) * 32  # of an entry
    num_parts = -(-tiles // part_tiles)
    # Together they wait for each other: all must run at once, and have cache lines for counters.
    is_resident = groups <= num_sms and groups * num_parts <= _WARPS_PER_SM * num_sms
    together = is_resident and num_parts > 1 and is_long(env.limits, max_kv_len)
    # The first part is an entry, and so is each work item that starts after it. Together, parts are
    # as short as each context asks for.
    first_tiles = MOST_UNIT if together else part_tiles
    max_entries = 2 + max(count_units(max_kv_len) - count_units(first_tiles * KEYS), 0)
    if groups * max_entries * floats > partials[0].numel():
        num_parts, part_tiles, max_entries, together = 1, max(tiles, 1), 1, False
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        env.step.block_tables.stride(0),
        part_tiles,
        max_entries,
    )
    grid = (max(num_parts, 1), heads, num_requests)
    many = are_many(call, env.limits, columns, groups)
    warps = _MANY_WARPS_PER_SM if many else _WARPS_PER_SM
    return Launch(batch_spec(call, env.limits, columns, warps, together=together), grid, arguments)


def is_long(limits: StepLimits, max_kv_len: int) -> bool:
    """Whether a context is divided as finely as there are warps."""
    return min(max_kv_len, limits.max_seq_len) > LONG


def _part_tiles(tiles: int, groups: int, num_sms: int) -> int:
    """Tiles of a part. Storing a work item costs a quarter of reading its keys, so contexts are
    divided only where there are too few warps (three per multiprocessor are enough) or one would
    take too long (4,096 keys). Blocks of parts that a shorter context does not have cost time, too:
    there are at most 8 parts if there are many groups."""
    if tiles * KEYS > LONG and 2 * groups <= _WARPS_PER_SM * num_sms:
        # as many parts as run at once, of whole work items
        each = -(-tiles // (_WARPS_PER_SM * num_sms // groups))
        return -(-each // MOST_UNIT) * MOST_UNIT
    wanted = max(1, (_WARPS_PER_SM - 1) * num_sms // groups)
    most = 32 if groups <= _WARPS_PER_SM * num_sms else 8
    return max(min(64, -(-tiles // wanted)), -(-tiles // most), 4)


def batch_spec(
    call: OpCall,
    limits: StepLimits,
    columns: int,
    warps: int = _WARPS_PER_SM,
    *,
    together: bool = False,
) -> KernelSpec:
    """One binary. warps: of a multiprocessor. together: all its warps run at once, and merge long
    contexts together."""
    size, tile_bytes = int(call.attributes["head_size"]), _tile_bytes(call, limits)
    words, constants = source_variant(call, limits)
    slots = max(_RING_BYTES[warps] // tile_bytes, _LEAST_TILES)
    query_bytes = columns * size * 2 if columns > COLUMNS[0] and size == 128 else 0
    constants |= {"COLUMNS": columns, "SLOTS": slots, "WARPS": warps, "QUERY_BYTES": query_bytes}
    constants |= {"TOGETHER": together}
    words += [f"c{columns}", *["all"] * together, *["many"] * (warps > _WARPS_PER_SM)]
    return KernelSpec(
        name=".".join(["paged_attention.batch", *words]),
        source="ops/paged_attention/batch/batch.cu",
        arguments=(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 3),
        constants=constants,
        entry="batch",
        num_warps=1,
        shared_bytes=slots * tile_bytes + query_bytes,
    )

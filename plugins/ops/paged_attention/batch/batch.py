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
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens
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
_LENGTH_BYTES = 4  # of a context's length in shared memory
_KEPT_BYTES = 128  # of shared memory: what a warp knows of its parts while it attends
_WARPS_PER_SM, _MANY_WARPS_PER_SM = _RING_BYTES
FEW_GROUPS = 16  # of requests and KV heads: split over thread blocks that wait for each other
FEW_PARTS = 4  # of a context, if fewer than so many would run at once: whoever is last merges them
FEW_REQUESTS = 4  # whose contexts are divided into as many parts each, however long they are
SHORT = 2048  # tokens of a context up to which warps do not wait for each other
LONG = 4096  # tokens of a context beyond which it is divided as finely as there are warps


def covers_batch(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel, and others with its warps, can compute this call for requests of one
    token, which then have 16-bit products."""
    page = limits.tokens_per_block
    return (
        fp8_tokens(call.attributes) is not Fp8Tokens.ALL
        and int(call.attributes["head_size"]) in (64, 128)
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
        found.append(batch_spec(call, limits, columns, together=True))
        found.append(batch_spec(call, limits, columns, together=True, several=True))
        if are_many(call, limits, columns, groups):
            many = _MANY_WARPS_PER_SM
            found.append(batch_spec(call, limits, columns, many))
            found.append(batch_spec(call, limits, columns, many, together=True, several=True))
    return found


def are_many(call: OpCall, limits: StepLimits, columns: int, groups: int) -> bool:
    """Whether eight warps to a multiprocessor serve so many requests times KV heads: more than four
    would take at once, of few rows, and with tiles small enough for a ring of half the size."""
    has_room = _LEAST_TILES * _tile_bytes(call, limits) <= _RING_BYTES[_MANY_WARPS_PER_SM]
    return groups > _WARPS_PER_SM * limits.num_sms and columns == COLUMNS[0] and has_room


def _tile_bytes(call: OpCall, limits: StepLimits) -> int:
    """Of a tile's keys, or values."""
    return KEYS * int(call.attributes["head_size"]) * (1 if limits.kv_dtype in (FP8, "int8") else 2)


def _ring_bytes(call: OpCall, limits: StepLimits, warps: int) -> int:
    """Of a warp's ring, whole tiles. The lengths of all contexts lie there before tiles do."""
    tile_bytes = _tile_bytes(call, limits)
    return max(_RING_BYTES[warps] // tile_bytes, _LEAST_TILES) * tile_bytes


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
    tiles, groups = max(-(-max_kv_len // KEYS), 1), num_requests * heads
    many = are_many(call, env.limits, columns, groups)
    per_sm, num_sms = _MANY_WARPS_PER_SM if many else _WARPS_PER_SM, env.limits.num_sms
    floats = columns // 8 * (size // 4 + 3) * 32  # of a work item
    # Where warps share contexts, these are cut every so many tiles.
    grain = MOST_UNIT if is_long(env.limits, max_kv_len) else MOST_UNIT // 2
    room = partials[0].numel() // (groups * floats)  # of a context
    warps = _num_warps(per_sm * num_sms, groups, heads, tiles, grain)
    parts = warps // num_requests  # of each context, where all have as many
    each = -(-tiles // max(parts, 1))
    each = -(-each // grain) * grain
    several = warps > 1 and (num_requests > FEW_REQUESTS or parts < FEW_PARTS)
    if several:
        room *= num_requests  # of all
    if parts >= FEW_PARTS:  # some places are left to the next kernel
        parts = -(-tiles // each)
        warps = parts * num_requests
    stored = 1 + count_units(max_kv_len) - count_units(grain * KEYS)
    if (warps if several else stored) > room:
        warps = 1
    if several and _LENGTH_BYTES * num_requests > _ring_bytes(call, env.limits, per_sm):
        warps = 1
    together = warps > 1
    if together:
        grid = (warps, heads, 1) if several else (parts, heads, num_requests)
    else:
        several = False
        each = _part_tiles(tiles, groups, num_sms)
        room = partials[0].numel() // (groups * floats)
        if 1 + max(count_units(max_kv_len) - count_units(each * KEYS), 0) > room:
            each = tiles
        parts = -(-tiles // each)
        grid = (parts, heads, num_requests)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        env.step.block_tables.stride(0),
        num_requests,
        parts,
        each,
        grain,
        room,
    )
    spec = batch_spec(call, env.limits, columns, per_sm, together=together, several=several)
    return Launch(spec, grid, arguments)


def is_long(limits: StepLimits, max_kv_len: int) -> bool:
    """Whether a context is divided as finely as there are warps."""
    return min(max_kv_len, limits.max_seq_len) > LONG


def _num_warps(slots: int, groups: int, heads: int, tiles: int, grain: int) -> int:
    """Of each KV head, which share its contexts: as many as run at once, where contexts may be long
    or are few. 1: warps do not wait for each other."""
    if tiles * KEYS <= SHORT or (tiles * KEYS <= LONG and groups * _WARPS_PER_SM > slots):
        return 1
    return min(slots // heads, groups // heads * -(-tiles // grain))


def _part_tiles(tiles: int, groups: int, num_sms: int) -> int:
    """Tiles of a part of a short context, where warps do not wait for each other. Storing a work
    item costs a quarter of reading its keys, so contexts are divided only where there are too few
    warps: three per multiprocessor are enough."""
    wanted = max(1, (_WARPS_PER_SM - 1) * num_sms // groups)
    return max(-(-tiles // wanted), 4) if tiles * KEYS <= LONG else tiles


def batch_spec(
    call: OpCall,
    limits: StepLimits,
    columns: int,
    warps: int = _WARPS_PER_SM,
    *,
    together: bool = False,
    several: bool = False,
) -> KernelSpec:
    """One binary. warps: of a multiprocessor. together: all its warps run at once, and merge long
    contexts together. several: contexts, which may be of different lengths."""
    size, ring_bytes = int(call.attributes["head_size"]), _ring_bytes(call, limits, warps)
    words, constants = source_variant(call, limits)
    slots = ring_bytes // _tile_bytes(call, limits)
    query_bytes = columns * size * 2 if columns > COLUMNS[0] and size == 128 else 0
    constants |= {"COLUMNS": columns, "SLOTS": slots, "WARPS": warps, "QUERY_BYTES": query_bytes}
    constants |= {"TOGETHER": together, "SEVERAL": several}
    constants |= {"FEW_PARTS": FEW_PARTS, "KEPT_BYTES": _KEPT_BYTES}
    words += [f"c{columns}", *["all"] * together, *["several"] * several]
    words += ["many"] * (warps > _WARPS_PER_SM)
    return KernelSpec(
        name=".".join(["paged_attention.batch", *words]),
        source="ops/paged_attention/batch/batch.cu",
        arguments=(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 6),
        constants=constants,
        entry="batch",
        num_warps=1,
        shared_bytes=ring_bytes + query_bytes + _KEPT_BYTES * several,
    )

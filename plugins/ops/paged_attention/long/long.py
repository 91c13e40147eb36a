"""The kernel for several tokens of a request against a long context: binaries and launches of
`long.cu`, for chains and for trees.

It gives the bits of the other kernels, so a step may use any. It supports the calls of chunk.cu
whose caches are FP8; requests of fewer rows are batch.cu's, and some steps of several chains
long_batch.cu's (long_batch.py). Thread blocks share contexts as far as there is room for their work
items; a context that is not shared needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.batch.batch import is_long
from llmctl.plugins.ops.paged_attention.chunk.chunk import covers_chunks
from llmctl.plugins.ops.paged_attention.long.entries import (
    TAIL_TILES,
    WINDOW_TILES,
    most_entries,
)
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

WARPGROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build the kernel."""

    warpgroups: int  # 64 rows of a thread block each
    blocks: int  # thread blocks of a multiprocessor
    byte_slots: int  # tiles as the cache has them
    # A tile in a thread block, microseconds, where every multiprocessor of an H200 has as many
    # thread blocks as it can have (docs/performance/log/verifications.md); and where contexts are
    # shared, as work items are stored then.
    tile_us: float
    shared_tile_us: float

    @property
    def rows(self) -> int:
        """Of a thread block."""
        return WARPGROUP_ROWS * self.warpgroups

    def shared_bytes(self, size: int) -> int:
        """Tiles as operands and as bytes, queries, barriers, and what a thread block has."""
        tile = 2 * KEYS * size
        operands = STAGES * 2 * tile + self.rows * size * 2
        return operands + self.byte_slots * tile + 4 * 8 * STAGES + _PLACE_BYTES


_PLACE_BYTES = 448
STAGES = 2  # tiles of keys, and of values, as operands
VARIANTS = (Variant(1, 2, 2, 1.5, 1.58), Variant(2, 1, 8, 1.21, 1.27))
MAX_TREE = (WINDOW_TILES - 1) * KEYS + 1  # keys: from any place in the root's tile
# Microseconds that thread blocks which share contexts take longer: they meet, and merge.
_SHARING_US = 15.0
_LEAST_HELPED = 6  # tiles of a share whose context's beginning others help with
_ALONE = 0.8  # of a tile's time, where a multiprocessor has one thread block that could have two


AnyVariant = TypeVar("AnyVariant")  # of long.cu or long_batch.cu


@dataclass(frozen=True, slots=True)
class Cut(Generic[AnyVariant]):
    """How a step is divided among thread blocks."""

    variant: AnyVariant
    block_tokens: int  # of a request, in a thread block
    num_blocks: int  # of rows of a request
    splits: int  # thread blocks that share a context, if all are as long as the longest may be
    entries: int  # stored work items of a context, at most; 0 where nobody shares one
    us: float  # about what it takes
    lacks_room: bool = False  # more would share it if there were room for their work items


def covers_long(call: OpCall, limits: StepLimits, *, has_trees: bool = False) -> bool:
    """Whether the kernel can compute this call for requests of several tokens, or for trees: then
    some whole tokens are eight columns, and there is room for the paths of a block of rows."""
    has_groups = group_size(call) in (2, 4, 8) or not has_trees
    is_fp8 = limits.kv_dtype == FP8 and covers_chunks(call, limits)
    return is_fp8 and limits.tokens_per_block >= 8 and has_groups


def long_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `long_launch` may ask for."""
    if not is_long(limits, limits.max_seq_len):
        return []
    found = []
    if covers_long(call, limits):
        rows = most_short_tokens(limits) * group_size(call)
        found += [
            long_spec(call, limits, each, has_trees=False, alone=alone)
            for each in VARIANTS
            for alone in sorted({False, _may_be_alone(limits, each)})
            if each.warpgroups == 1 or rows > WARPGROUP_ROWS
        ]
    if limits.takes_trees and covers_long(call, limits, has_trees=True):
        found += [long_spec(call, limits, each, has_trees=True) for each in VARIANTS]
    return found


def long_launch(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    partials: tuple[torch.Tensor, torch.Tensor],
    logit_scale: float,
    short: int,
    *,
    has_trees: bool,
) -> Launch | None:
    """Attend for requests of up to `short` tokens; None where contexts are not long, or for what
    this kernel does not support.

    partials: room for the work items of shared contexts, and a line of 32 counters for each block
    of rows, of which one is used; it is zero before and after.
    """
    limits, step = env.limits, env.step
    if not is_long(limits, shape.max_kv_len):
        return None
    if not covers_long(call, limits, has_trees=has_trees):
        return None
    if has_trees and max(min(shape.max_query_len, short), shape.max_tree_len) > MAX_TREE:
        return None
    cut = cut_of(call, limits, shape, short, partials, has_trees=has_trees)
    if shape.num_requests == 1 and not has_trees and cut.lacks_room:
        return None
    trees: tuple[torch.Tensor | int, ...] = ()
    if has_trees:
        tokens = min(call.inputs["q"].shape[0], step.position_ids.shape[0])
        places = (step.tree_start, step.tree_root, step.paths, step.paths.stride(0))
        trees = (env.kv_cache[0].shape[0], tokens, *places)
    rows = int(call.attributes["num_kv_heads"]) * cut.num_blocks
    alone = not has_trees and cut.splits == 1 and _may_be_alone(limits, cut.variant)
    entry = cut.block_tokens * group_size(call) * (int(call.attributes["head_size"]) + 2)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        step.block_tables.stride(0),
        cut.block_tokens,
        short,
        partials[0].numel() // (entry if alone else rows * entry),
        shape.num_requests,
        *trees,
    )
    spec = long_spec(call, limits, cut.variant, has_trees=has_trees, alone=alone)
    at_once = cut.variant.blocks * limits.num_sms
    if alone:  # of ranges of all tiles
        grid = (at_once, 1, 1)
    elif shape.num_requests == 1:
        helpers = 0 if has_trees else _helpers(call, cut, min(shape.max_kv_len, limits.max_seq_len))
        grid = (cut.splits, rows, 1)
        if helpers and cut.splits * rows + helpers <= at_once:
            grid = (cut.splits * rows + helpers, 1, 1)
    elif at_once // rows > shape.num_requests:  # all share all contexts
        grid = (at_once // rows, rows, 1)
    else:
        grid = (1, rows, shape.num_requests)
    return Launch(spec, grid, arguments)


def cut_of(
    call: OpCall,
    limits: StepLimits,
    shape: StepShape,
    short: int,
    partials: tuple[torch.Tensor, torch.Tensor],
    *,
    has_trees: bool,
) -> Cut[Variant]:
    """The fastest way by the time of a tile and waves of thread blocks."""
    room = partials[0].numel()
    size, group = int(call.attributes["head_size"]), group_size(call)
    most = min(shape.max_query_len, short)
    tiles = -(-min(shape.max_kv_len, limits.max_seq_len) // KEYS)
    contexts = shape.num_requests * int(call.attributes["num_kv_heads"])
    found = []
    for variant in VARIANTS:
        num_blocks = -(-most // (variant.rows // group))
        block_tokens = -(-most // num_blocks)
        groups, at_once = contexts * num_blocks, variant.blocks * limits.num_sms
        an_entry = groups * block_tokens * group * (size + 2)
        wanted = max(at_once // groups, 1)
        helped = not has_trees and shape.num_requests == num_blocks == 1
        splits, entries = _choose_splits(tiles, wanted, room // an_entry, has_trees, helped)
        each = -(-groups * splits // at_once) * -(-tiles // splits)  # tiles, one after another
        if splits == 1 and not has_trees and _may_be_alone(limits, variant):
            each = max(-(-groups * tiles // at_once), tiles)  # as ranges
        us = each * variant.tile_us if splits == 1 else each * variant.shared_tile_us + _SHARING_US
        if variant.blocks > 1 and groups * splits <= limits.num_sms:
            us *= _ALONE
        found.append(
            Cut(variant, block_tokens, num_blocks, splits, entries, us, lacks_room=splits < wanted)
        )
    return min(found, key=lambda each: each.us)


def _helpers(call: OpCall, cut: Cut[Variant], longest: int) -> int:
    """Thread blocks that would help two contexts of KV heads each with their beginnings, which have
    most work items (`Place::put_helped`), if so many multiprocessors are left."""
    heads = int(call.attributes["num_kv_heads"])
    may_help = cut.variant.warpgroups == 2 and cut.num_blocks == 1 and heads % 2 == 0
    is_long_enough = cut.splits > 1 and longest > _LEAST_HELPED * KEYS * cut.splits
    return heads // 2 if may_help and is_long_enough else 0


def _choose_splits(
    tiles: int, most: int, room: int, has_trees: bool, helped: bool
) -> tuple[int, int]:
    """Thread blocks of a context, at most so many, and for how many entries there must be room."""
    for splits in range(most, 1, -1):
        entries = most_entries(tiles, splits, has_trees, helped)
        if entries <= room:
            return splits, entries
    return 1, 0


def _may_be_alone(limits: StepLimits, variant: Variant) -> bool:
    """Whether there is a binary for steps in which no context is shared. With 128 rows it was not
    faster (of trees)."""
    return variant.warpgroups == 1 and limits.max_batch_size > 1


def long_spec(
    call: OpCall, limits: StepLimits, variant: Variant, *, has_trees: bool, alone: bool = False
) -> KernelSpec:
    """One binary. alone: for steps in which no context is shared."""
    words, constants = source_variant(call, limits)
    shared_bytes = variant.shared_bytes(int(call.attributes["head_size"]))
    constants |= {
        "WARPGROUPS": variant.warpgroups,
        "STAGES": STAGES,
        "BYTE_SLOTS": variant.byte_slots,
        "ALONE": alone,
        "TREE": has_trees,
        "TAIL_TILES": TAIL_TILES,
        "WINDOW_TILES": WINDOW_TILES,
        "LEAST_HELPED": _LEAST_HELPED,
        "SHARED_BYTES": shared_bytes,
    }
    parts = ["paged_attention.long", *words, f"r{variant.rows}"]
    parts += ["trees"] * has_trees + ["alone"] * alone
    return KernelSpec(
        name=".".join(parts),
        source="ops/paged_attention/long/long.cu",
        arguments=(
            *(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 5),
            *(("i32", "i32", *["*i32"] * 3, "i32") if has_trees else ()),
        ),
        constants=constants,
        entry="attend_long",
        num_warps=4 + 4 * variant.warpgroups,
        shared_bytes=shared_bytes,
    )

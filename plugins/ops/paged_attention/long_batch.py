"""The kernel for several tokens each of several requests with long contexts: binaries and launches
of `long_batch.cu`, for chains and for trees.

It gives the bits of the other kernels, so a step may use any. It supports the calls of chunk.cu
whose caches are FP8, and is for steps that long.cu has no room or too few multiprocessors for; one
request alone is faster there, but for some chains (`is_faster_for_one`). It needs no more room than
there is: contexts that have none for their work items are not shared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.batch import is_long
from llmctl.plugins.ops.paged_attention.chunk import covers_chunks
from llmctl.plugins.ops.paged_attention.long import WARPGROUP_ROWS
from llmctl.plugins.ops.paged_attention.source_specs import (
    group_size,
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.tiles import KEYS, count_units, unit_start

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build the kernel."""

    rows: int  # of a thread block, the columns of its products
    streams: int  # warpgroups, which process a work item each
    slots: int  # tiles of keys, and of values, of each
    # A tile in a thread block, microseconds, where every multiprocessor of an H200 has one
    # (docs/performance/log/attention.md).
    tile_us: float

    def shared_bytes(self, size: int) -> int:
        """Sums and states of what is merged, fades, turns; queries; logits; tiles."""
        states = self.rows * size * 4 + self.rows * 8 + self.streams * (self.rows * 4 + 8)
        rows = self.rows * size * 2 + self.streams * self.rows * KEYS * 4
        return -(-states // 1024) * 1024 + rows + 2 * self.streams * self.slots * KEYS * size


VARIANTS = (Variant(48, 3, 3, 0.91), Variant(88, 2, 3, 1.17), Variant(128, 2, 2, 1.70))
# One chain of more rows than a warpgroup of long.cu has, up to those of a binary, is faster here in
# contexts of more tokens: 75 us instead of 81 at 32,768 (docs/performance/log/attention.md).
_ONE_ROWS, _ONE_FASTER = range(WARPGROUP_ROWS + 1, VARIANTS[1].rows + 1), 24_576
WINDOW_TILES = 3  # from a tree's root's on
MAX_TREE = (WINDOW_TILES - 1) * KEYS + 1  # keys: from any place in the root's tile
# How long_batch.cu divides a context: what merging a work item costs, a tile, and in tiles what
# follows a tree's root.
_ITEM_COST, _TILE_COST, _TAIL_TILES = 2, 4, 6


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step is divided among thread blocks."""

    variant: Variant
    block_tokens: int  # of a request, in a thread block
    num_blocks: int  # of rows of a request
    splits: int  # thread blocks that share a context
    entries: int  # stored work items of a context, at most; 0 where nobody shares one


def covers_long_batch(call: OpCall, limits: StepLimits, *, has_trees: bool = False) -> bool:
    """Whether the kernel can compute this call for requests of several tokens, or for trees: then
    some whole tokens are eight columns."""
    has_groups = group_size(call) in (2, 4, 8) or not has_trees
    has_pages = limits.tokens_per_block >= 8
    return limits.kv_dtype == FP8 and has_groups and has_pages and covers_chunks(call, limits)


def long_batch_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `long_batch_launch` may ask for."""
    if not is_long(limits, limits.max_seq_len):
        return []
    most, group, found = most_short_tokens(limits), group_size(call), []
    if limits.max_batch_size == 1:
        is_reached = limits.max_seq_len > _ONE_FASTER and covers_long_batch(call, limits)
        has_chains = any(each * group in _ONE_ROWS for each in range(1, most + 1))
        if not (is_reached and has_chains):
            return []
        return [long_batch_spec(call, limits, VARIANTS[1], has_trees=False)]
    if covers_long_batch(call, limits):
        found += [
            long_batch_spec(call, limits, each, has_trees=False)
            for fewer, each in zip((0, *(v.rows for v in VARIANTS)), VARIANTS, strict=False)
            if fewer < group * most
        ]
    if limits.takes_trees and covers_long_batch(call, limits, has_trees=True):
        found += [long_batch_spec(call, limits, each, has_trees=True) for each in VARIANTS]
    return found


def is_faster_for_one(call: OpCall, shape: StepShape, short: int, *, has_trees: bool) -> bool:
    """Whether a request alone is faster here than in long.cu, where that has room for it."""
    rows = min(shape.max_query_len, short) * group_size(call)
    is_one = shape.num_requests == 1 and not has_trees
    return is_one and rows in _ONE_ROWS and shape.max_kv_len > _ONE_FASTER


def long_batch_launch(
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
    if not covers_long_batch(call, limits, has_trees=has_trees):
        return None
    if has_trees and max(min(shape.max_query_len, short), shape.max_tree_len) > MAX_TREE:
        return None
    cut = choose_cut(call, limits, shape, short, partials[0].numel(), has_trees=has_trees)
    trees: tuple[torch.Tensor | int, ...] = ()
    if has_trees:
        tokens = min(call.inputs["q"].shape[0], step.position_ids.shape[0])
        places = (step.tree_start, step.tree_root, step.paths, step.paths.stride(0))
        trees = (env.kv_cache[0].shape[0], tokens, *places)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        step.block_tables.stride(0),
        cut.block_tokens,
        short,
        cut.entries,
        *trees,
    )
    rows = int(call.attributes["num_kv_heads"]) * cut.num_blocks
    spec = long_batch_spec(call, limits, cut.variant, has_trees=has_trees)
    return Launch(spec, (cut.splits, rows, shape.num_requests), arguments)


def choose_cut(
    call: OpCall, limits: StepLimits, shape: StepShape, short: int, room: int, *, has_trees: bool
) -> Cut:
    """The fastest way by the time of a tile and waves of thread blocks. room: numbers for work
    items."""
    size, group = int(call.attributes["head_size"]), group_size(call)
    most = min(shape.max_query_len, short)
    tiles = -(-min(shape.max_kv_len, limits.max_seq_len) // KEYS)
    contexts = shape.num_requests * int(call.attributes["num_kv_heads"])
    found: list[tuple[float, int, Cut]] = []
    for variant in VARIANTS:
        if variant.rows < group:
            continue
        num_blocks = -(-most // (variant.rows // group))
        groups = contexts * num_blocks
        splits, entries = _choose_splits(
            tiles,
            limits.num_sms // groups,
            room // (groups * variant.rows * (size + 2)),
            has_trees,
        )
        waves = -(-groups * splits // limits.num_sms)
        cut = Cut(variant, -(-most // num_blocks), num_blocks, splits, entries)
        found.append((waves * -(-tiles // splits) * variant.tile_us, num_blocks, cut))
    return min(found, key=lambda each: each[:2])[2]


def _choose_splits(tiles: int, most: int, room: int, has_trees: bool) -> tuple[int, int]:
    """Thread blocks of a context, at most so many, and for how many entries there must be room."""
    for splits in range(most, 1, -1):
        entries = most_entries(tiles, splits, has_trees)
        if entries <= room:
            return splits, entries
    return 1, 0


def most_entries(tiles: int, splits: int, has_trees: bool) -> int:
    """Of a context of up to so many tiles: the work items of all shares but the first, and one."""
    return _entries(1 << tiles.bit_length(), splits, has_trees)[tiles]


@lru_cache(maxsize=256)
def _entries(tiles: int, splits: int, has_trees: bool) -> tuple[int, ...]:
    """`most_entries` of fewer tiles."""
    starts = [unit_start(unit) for unit in range(count_units(tiles * KEYS) + 1)]
    costs = [_TILE_COST * start + _ITEM_COST * unit for unit, start in enumerate(starts)]
    units = [bisect_left(starts, each) for each in range(tiles)]
    firsts = []  # of the second share (`Share::border`)
    for each, count in enumerate(units):
        every = _TILE_COST * (each + _TAIL_TILES * has_trees) + _ITEM_COST * count
        unit = bisect_right(costs, every // splits) - 1
        firsts.append(max(min(unit, count - 1), 0))
    behind = range(WINDOW_TILES + 1) if has_trees else (0,)
    found = [1 + max(units[n] - firsts[max(n - b, 0)] for b in behind) for n in range(tiles)]
    return tuple(accumulate(found, max))


def long_batch_spec(
    call: OpCall, limits: StepLimits, variant: Variant, *, has_trees: bool
) -> KernelSpec:
    """One binary."""
    words, constants = source_variant(call, limits)
    shared_bytes = variant.shared_bytes(int(call.attributes["head_size"]))
    constants |= {
        "ROWS": variant.rows,
        "STREAMS": variant.streams,
        "SLOTS": variant.slots,
        "TREE": has_trees,
        "WINDOW_TILES": WINDOW_TILES,
        "SHARED_BYTES": shared_bytes,
    }
    parts = ["paged_attention.long_batch", *words, f"r{variant.rows}", *["trees"] * has_trees]
    return KernelSpec(
        name=".".join(parts),
        source="ops/paged_attention/long_batch.cu",
        arguments=(
            *(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 4),
            *(("i32", "i32", *["*i32"] * 3, "i32") if has_trees else ()),
        ),
        constants=constants,
        entry="attend_long_batch",
        num_warps=4 * variant.streams,
        shared_bytes=shared_bytes,
    )

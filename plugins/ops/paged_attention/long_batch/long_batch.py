"""The kernel for chains of several requests with long contexts whose rows are many more than a
warpgroup of long.cu has and few enough for one thread block here: binaries and launches of
`long_batch.cu`.

It gives the bits of the other kernels, so a step may use any. Its products have as many columns as
there are rows, where long.cu's have 64 or 128 rows; with those, and for one request, long.cu is
faster. It needs no more room than there is: contexts that have none for their work items are not
shared.
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
from llmctl.plugins.ops.paged_attention.batch.batch import is_long
from llmctl.plugins.ops.paged_attention.long.long import WARPGROUP_ROWS, Cut, covers_long
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, count_units, unit_start

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
    # (docs/performance/log/attention.md); and where contexts are shared, as work items are stored.
    tile_us: float
    shared_tile_us: float

    def shared_bytes(self, size: int) -> int:
        """Sums and states of what is merged, fades, turns; queries; logits; tiles."""
        states = self.rows * size * 4 + self.rows * 8 + self.streams * (self.rows * 4 + 8)
        rows = self.rows * size * 2 + self.streams * self.rows * KEYS * 4
        return -(-states // 1024) * 1024 + rows + 2 * self.streams * self.slots * KEYS * size


# Of 48 rows: two blocks of a request's, where one leaves multiprocessors idle.
VARIANTS = (Variant(48, 3, 3, 0.84, 0.94), Variant(88, 2, 3, 1.09, 1.25))
# Microseconds that thread blocks which share contexts take longer: they meet, and merge.
_SHARING_US = 32.0
# How long_batch.cu divides a context: what merging a work item costs, and a tile.
_ITEM_COST, _TILE_COST = 2, 4


def _has_its_rows(tokens: int, group: int) -> bool:
    return WARPGROUP_ROWS < tokens * group <= VARIANTS[-1].rows


def long_batch_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `long_batch_launch` may ask for."""
    most, group = most_short_tokens(limits), group_size(call)
    is_reached = is_long(limits, limits.max_seq_len) and limits.max_batch_size > 1
    has_rows = any(_has_its_rows(tokens, group) for tokens in range(1, most + 1))
    if not (is_reached and has_rows and covers_long(call, limits)):
        return []
    return [long_batch_spec(call, limits, each) for each in VARIANTS]


def long_batch_launch(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    partials: tuple[torch.Tensor, torch.Tensor],
    logit_scale: float,
    short: int,
    *,
    within_us: float,
) -> Launch | None:
    """Attend for requests of up to `short` tokens, none of which has a tree; None where contexts
    are not long, for what this kernel does not support, or where it takes longer than `within_us`.

    partials: room for the work items of shared contexts, and a line of 32 counters for each block
    of rows, of which one is used; it is zero before and after.
    """
    limits = env.limits
    is_its = _has_its_rows(min(shape.max_query_len, short), group_size(call))
    if shape.num_requests == 1 or not is_its or not is_long(limits, shape.max_kv_len):
        return None
    if not covers_long(call, limits):
        return None
    cut = choose_cut(call, limits, shape, short, partials[0].numel())
    if cut.us >= within_us:
        return None
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        env.step.block_tables.stride(0),
        cut.block_tokens,
        short,
        cut.entries,
    )
    rows = int(call.attributes["num_kv_heads"]) * cut.num_blocks
    spec = long_batch_spec(call, limits, cut.variant)
    return Launch(spec, (cut.splits, rows, shape.num_requests), arguments)


def choose_cut(
    call: OpCall, limits: StepLimits, shape: StepShape, short: int, room: int
) -> Cut[Variant]:
    """The fastest way by the time of a tile and waves of thread blocks. room: numbers for work
    items."""
    size, group = int(call.attributes["head_size"]), group_size(call)
    most = min(shape.max_query_len, short)
    tiles = -(-min(shape.max_kv_len, limits.max_seq_len) // KEYS)
    contexts = shape.num_requests * int(call.attributes["num_kv_heads"])
    found: list[Cut[Variant]] = []
    for variant in VARIANTS:
        if variant.rows < group:
            continue
        num_blocks = -(-most // (variant.rows // group))
        groups = contexts * num_blocks
        splits, entries = _choose_splits(
            tiles, limits.num_sms // groups, room // (groups * variant.rows * (size + 2))
        )
        each = -(-groups * splits // limits.num_sms) * -(-tiles // splits)  # one after another
        us = each * variant.tile_us if splits == 1 else each * variant.shared_tile_us + _SHARING_US
        found.append(Cut(variant, -(-most // num_blocks), num_blocks, splits, entries, us))
    return min(found, key=lambda each: each.us)


def _choose_splits(tiles: int, most: int, room: int) -> tuple[int, int]:
    """Thread blocks of a context, at most so many, and for how many entries there must be room."""
    for splits in range(most, 1, -1):
        entries = most_entries(tiles, splits)
        if entries <= room:
            return splits, entries
    return 1, 0


def most_entries(tiles: int, splits: int) -> int:
    """Of a context of up to so many tiles: the work items of all shares but the first, and one."""
    return _entries(1 << tiles.bit_length(), splits)[tiles]


@lru_cache(maxsize=256)
def _entries(tiles: int, splits: int) -> tuple[int, ...]:
    """`most_entries` of fewer tiles."""
    starts = [unit_start(unit) for unit in range(count_units(tiles * KEYS) + 1)]
    costs = [_TILE_COST * start + _ITEM_COST * unit for unit, start in enumerate(starts)]
    units = [bisect_left(starts, each) for each in range(tiles)]
    found = []
    for each, count in enumerate(units):
        every = _TILE_COST * each + _ITEM_COST * count
        first = bisect_right(costs, every // splits) - 1  # of the second share (`Share::border`)
        found.append(1 + count - max(min(first, count - 1), 0))
    return tuple(accumulate(found, max))


def long_batch_spec(call: OpCall, limits: StepLimits, variant: Variant) -> KernelSpec:
    """One binary."""
    words, constants = source_variant(call, limits)
    shared_bytes = variant.shared_bytes(int(call.attributes["head_size"]))
    constants |= {
        "ROWS": variant.rows,
        "STREAMS": variant.streams,
        "SLOTS": variant.slots,
        "SHARED_BYTES": shared_bytes,
    }
    return KernelSpec(
        name=".".join(["paged_attention.long_batch", *words, f"r{variant.rows}"]),
        source="ops/paged_attention/long_batch/long_batch.cu",
        arguments=(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 4),
        constants=constants,
        entry="attend_long_batch",
        num_warps=4 * variant.streams,
        shared_bytes=shared_bytes,
    )

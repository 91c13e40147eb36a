"""The kernel for verification, and for few tokens in general: binaries and launches of
`verification.cu`, for chains and for trees.

It gives the bits of the other kernels, so a step may use any. It supports the same calls as
batch.cu, and is used if all its thread blocks run at once, one per multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.core.op_spec import FP8
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

MAX_CONTEXT = 4096  # tokens: a warp processes its tiles one by one
# Dimensions of all heads from which on more than two thread blocks to a context are faster, and the
# most blocks: two to a multiprocessor are slower than half as many with more units each.
_WIDE, _MOST_OF_SPLIT = 5120, 96
_EARLY_ROWS = 16  # of blocks of wide heads that let the next kernel start before their own copies
# Trees. The time of a wave of thread blocks by their rows: microseconds for up to 16 tiles, and for
# each that follows; measured on an H100 (docs/performance/trees.md).
_WAVE_US = {8: (9.3, 0.16), 16: (10.3, 0.26), 24: (11.6, 0.38)}
_TILES_AT_ONCE = 16
# How many waves are faster than Triton's kernel, and up to which context, tokens.
_MOST_WAVES, _MOST_IN_TURN = 5, 1536


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build the kernel."""

    splits: int  # thread blocks that share a context, a cluster
    units: int  # work items that a thread block processes at once, one per warp
    rows: int  # of a thread block
    has_trees: bool = False

    def __str__(self) -> str:
        return f"k{self.splits}u{self.units}r{self.rows}" + ".trees" * self.has_trees

    @property
    def spare_warps(self) -> int:
        """Which make twelve of eleven: 24 rows are merged by as many warps, two each."""
        return int(self.has_trees and self.units + self.rows // 8 == 11)

    @property
    def num_warps(self) -> int:
        """One for each work item, and for trees one for each eight rows."""
        return self.units + (self.rows // 8 if self.has_trees else 0) + self.spare_warps

    def shared_bytes(self, call: OpCall, limits: StepLimits) -> int:
        """Tiles; what trees need; states and factors of work items; the state passed between
        blocks; queries, a barrier; the step parameters."""
        size = int(call.attributes["head_size"])
        tile = KEYS * size * (1 if limits.kv_dtype in (FP8, "int8") else 2)
        states = 2 * self.units * self.rows * 8
        message = self.rows * (size * 4 + 8)
        queries = self.rows * size * 2
        end = self.splits * self.units
        # The tiles that may be of the last block's first units: of two the first may have fewer.
        has_shares = self.splits == 2 and not self.has_trees
        least = (7 if self.units > 8 else (self.units - 2) // 2) if has_shares else self.units
        tiles = unit_start(end) - unit_start((self.splits - 1) * least)
        pages = tiles * KEYS // limits.tokens_per_block + (limits.tokens_per_block > KEYS)
        gathered = -(-4 * (self.rows + 7 + pages + 2) // 8) * 8
        trees = 0
        if self.has_trees:  # keys and values from the root's tile on, and each token's rows of them
            window = WINDOW_TILES * tile + max(tile // KEYS, 128)
            trees = 2 * window + self.rows // group_size(call) * WINDOW_TILES * KEYS
        return self.units * 2 * tile + trees + states + message + queries + 16 + gathered


# Of 16 units, and of 20 and 24 for contexts of up to 1,536 and 2,048 tokens, which take them all at
# once.
VARIANTS = (
    *(Variant(4, 4, 8), Variant(2, 8, 8), Variant(2, 8, 16)),
    *(Variant(5, 4, 8), Variant(2, 10, 8), Variant(2, 10, 16)),
    *(Variant(6, 4, 8), Variant(2, 12, 8), Variant(2, 12, 16)),
)
# The same for requests with trees of tokens; the second line where tiles have 16-bit numbers.
TREE_VARIANTS = (
    *(Variant(k, 8, rows, has_trees=True) for k in (2, 4) for rows in _WAVE_US),
    *(Variant(4, 4, rows, has_trees=True) for rows in _WAVE_US),
)
WINDOW_TILES = 2  # from a tree's root's on
MAX_TREE = (WINDOW_TILES - 1) * KEYS + 1  # keys: from any place in the root's tile


def verification_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `choose_variant` may ask for."""
    trees = _tree_variants(call, limits) if limits.takes_trees else []
    return [verification_spec(call, limits, each) for each in (*_variants(call, limits), *trees)]


def choose_variant(
    call: OpCall, limits: StepLimits, num_requests: int, max_tokens: int, max_kv_len: int
) -> Variant | None:
    """How to run such a step; None if another kernel serves it better (scripts/bench/steps.py)."""
    if max_kv_len > MAX_CONTEXT:
        return None
    variants, units = _variants(call, limits), count_units(max_kv_len)
    at_once = [each for each in variants if each.splits * each.units >= units]
    for variant in (*at_once, *variants):
        if _runs_at_once(variant, call, limits, num_requests, max_tokens):
            return variant
    return None


def _runs_at_once(
    variant: Variant, call: OpCall, limits: StepLimits, num_requests: int, max_tokens: int
) -> bool:
    """Whether all thread blocks of such a step do, and are fast together."""
    blocks = variant.splits * count_groups(variant, call, num_requests, max_tokens)
    return blocks <= (_MOST_OF_SPLIT if variant.splits > 2 else limits.num_sms)


def choose_tree_variant(
    call: OpCall,
    limits: StepLimits,
    num_requests: int,
    max_tokens: int,
    max_kv_len: int,
    max_tree_len: int,
) -> tuple[Variant, float] | None:
    """How to run a step with trees, of up to max_tokens tokens in it and max_tree_len keys from the
    root's on, fastest, and about how many microseconds that takes; None where no binary can.

    One thread block runs per multiprocessor, and what does not fit follows in further waves.
    """
    variants = _tree_variants(call, limits)
    if max_tree_len > MAX_TREE or not variants:
        return None

    def microseconds(variant: Variant) -> float:
        first, more = _WAVE_US[variant.rows]
        tiles = -(-max_kv_len // KEYS)
        waves = tree_waves(variant, call, limits, num_requests, max_tokens)
        return waves * (first + more * max(tiles - _TILES_AT_ONCE, 0))

    fewest = min(each.splits for each in variants)
    most = max(each.splits for each in variants)
    ways = [each for each in variants if each.splits == fewest]
    if max_kv_len > MAX_CONTEXT:  # more thread blocks share a context, if all run at once
        wide = [each for each in variants if each.splits == most]
        at_once = [
            each for each in wide if tree_waves(each, call, limits, num_requests, max_tokens) == 1
        ]
        ways = at_once[:1] or ways
    fastest = min(ways, key=microseconds)
    return fastest, microseconds(fastest)


def tree_waves(
    variant: Variant, call: OpCall, limits: StepLimits, num_requests: int, max_tokens: int
) -> int:
    """How often all multiprocessors have a thread block."""
    groups = count_groups(variant, call, num_requests, max_tokens)
    return -(-variant.splits * groups // limits.num_sms)


def is_faster_than_triton(waves: int, max_kv_len: int) -> bool:
    """Whether so many waves are, for trees."""
    return waves <= (_MOST_WAVES if max_kv_len <= _MOST_IN_TURN else 1)


def verification_launch(
    call: OpCall,
    env: LaunchEnv,
    variant: Variant,
    num_requests: int,
    max_tokens: int,
    tensors: tuple[torch.Tensor, ...],
    logit_scale: float,
    short: int,
) -> Launch:
    """Attend for requests of up to max_tokens tokens; others serve those longer than `short`."""
    groups = count_groups(variant, call, num_requests, max_tokens)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        logit_scale,
        env.step.block_tables.stride(0),
        variant.rows // group_size(call),
        short,
        env.kv_cache[0].shape[0],
        min(call.inputs["q"].shape[0], env.step.position_ids.shape[0]),
    )
    grid = (variant.splits, groups // num_requests, num_requests)
    if variant.has_trees:
        step = env.step
        places = step.tree_start, step.tree_root, step.paths, step.paths.stride(0)
        arguments = (*arguments, *places)
    return Launch(verification_spec(call, env.limits, variant), grid, arguments)


def count_groups(variant: Variant, call: OpCall, num_requests: int, max_tokens: int) -> int:
    """Blocks of rows of all requests and KV heads."""
    block_tokens = max(variant.rows // group_size(call), 1)
    return num_requests * int(call.attributes["num_kv_heads"]) * -(-max_tokens // block_tokens)


def _variants(call: OpCall, limits: StepLimits) -> list[Variant]:
    """Those for the call's heads and cache, in the order of preference, that are the best for any
    step within the limits."""
    is_wide = _is_wide(call)
    found: list[Variant] = []
    for variant in VARIANTS:
        has_splits = is_wide or variant.splits == 2
        if has_splits and fits(variant, call, limits) and _is_best(variant, found, call, limits):
            found.append(variant)
    return found


def _is_wide(call: OpCall) -> bool:
    return int(call.attributes["num_heads"]) * int(call.attributes["head_size"]) >= _WIDE


def _is_best(variant: Variant, before: list[Variant], call: OpCall, limits: StepLimits) -> bool:
    """Whether a step within the limits prefers a variant to those before it."""
    units = count_units(min(limits.max_seq_len, MAX_CONTEXT))
    largest = limits.max_batch_size, most_short_tokens(limits)
    for each in before:
        takes_all = each.splits * each.units >= units  # a context's work items, at once
        if takes_all and (
            (each.splits, each.rows) == (variant.splits, variant.rows)
            or _runs_at_once(each, call, limits, *largest)
        ):
            return False
    return True


def _tree_variants(call: OpCall, limits: StepLimits) -> list[Variant]:
    """Whole tokens are eight columns, or eight columns are whole tokens. Those of most splits are
    for contexts beyond MAX_CONTEXT alone."""
    if 8 % group_size(call) or limits.tokens_per_block < 8:
        return []
    found = [each for each in TREE_VARIANTS if fits(each, call, limits)]
    most = max((each.units for each in found), default=0)
    found = [each for each in found if each.units == most]
    if limits.max_seq_len > MAX_CONTEXT:
        return found
    fewest = min((each.splits for each in found), default=0)
    return [each for each in found if each.splits == fewest]


def fits(variant: Variant, call: OpCall, limits: StepLimits) -> bool:
    """Whether a token's rows, the tiles of the cache and a tile's page numbers find room."""
    has_room = variant.shared_bytes(call, limits) <= HOPPER.max_shared_bytes
    has_registers = limits.tokens_per_block >= 32 or variant.units * variant.rows <= 128
    return has_room and has_registers and group_size(call) <= variant.rows


def verification_spec(call: OpCall, limits: StepLimits, variant: Variant) -> KernelSpec:
    """One binary."""
    words, constants = source_variant(call, limits)
    shared_bytes = variant.shared_bytes(call, limits)
    constants |= {
        "SPLITS": variant.splits,
        "UNITS": variant.units,
        "ROWS": variant.rows,
        "TREE": variant.has_trees,
        "EARLY": _is_wide(call) and variant.rows == _EARLY_ROWS and not variant.has_trees,
        "SPARE_WARPS": variant.spare_warps,
        "WINDOW_TILES": WINDOW_TILES,
        "SHARED_BYTES": shared_bytes,
    }
    return KernelSpec(
        name=".".join(["paged_attention.verification", *words, str(variant)]),
        source="ops/paged_attention/verification/verification.cu",
        arguments=(
            *(*tensor_types(call, limits), "fp32", *["i32"] * 5),
            *((*["*i32"] * 3, "i32") if variant.has_trees else ()),
        ),
        constants=constants,
        entry="verification",
        num_warps=variant.num_warps,
        shared_bytes=shared_bytes,
        cluster=variant.splits,
    )

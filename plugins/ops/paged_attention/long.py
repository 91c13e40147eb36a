"""The kernel for several tokens of a request against a long context: binaries and launches of
`long.cu`, for chains and for trees.

It gives the bits of the other kernels, so a step may use any. It supports the calls of chunk.cu
whose caches are FP8, and is used if several thread blocks can share each context, all of which run
at once, one per multiprocessor; requests of fewer rows are batch.cu's.
"""

from __future__ import annotations

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
from llmctl.plugins.ops.paged_attention.source_specs import group_size, source_variant, tensor_types
from llmctl.plugins.ops.paged_attention.tiles import KEYS, count_units

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

WARPGROUPS, WARPGROUP_ROWS = 2, 64
WARPS = 4 + 4 * WARPGROUPS  # four that bring tiles
SLOTS = 4  # tiles of keys, and of values
WINDOW_TILES = 3  # from a tree's root's on
MAX_TREE = (WINDOW_TILES - 1) * KEYS + 1  # tokens: from any place in the root's tile
_MERGED_ROWS, _MERGED_UNITS = 9, 16  # whose factors are kept at once, twice
# Tokens of a context up to which generation.cu is as fast for one chain of more rows than a
# warpgroup has (docs/performance/log/attention.md).
_AS_FAST = 8192


def covers_long(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call for chains."""
    return limits.kv_dtype == FP8 and covers_chunks(call, limits)


def covers_long_trees(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call for trees: some whole tokens are eight columns, and
    there is room for the paths of a block of rows."""
    return (
        covers_long(call, limits) and group_size(call) in (2, 4, 8) and limits.tokens_per_block >= 8
    )


def long_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `long_launch` may ask for."""
    if not is_long(limits, limits.max_seq_len):
        return []
    chains = [long_spec(call, limits, has_trees=False)] if covers_long(call, limits) else []
    has_trees = limits.takes_trees and covers_long_trees(call, limits)
    return chains + ([long_spec(call, limits, has_trees=True)] if has_trees else [])


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
    """Attend for requests of up to `short` tokens; None where contexts are not long or this kernel
    cannot serve the step.

    partials: room for all work items of all rows, and a line of 32 counters for each block of rows,
    of which one is used; it is zero before and after.
    """
    limits, step = env.limits, env.step
    covers = covers_long_trees if has_trees else covers_long
    if not is_long(limits, shape.max_kv_len) or not covers(call, limits):
        return None
    size, group = int(call.attributes["head_size"]), group_size(call)
    most = min(shape.max_query_len, short)
    num_blocks = -(-most // (WARPGROUPS * WARPGROUP_ROWS // group))
    block_tokens = -(-most // num_blocks)
    streams = 2 if block_tokens * group <= WARPGROUP_ROWS else 1
    is_one = shape.num_requests == 1 and num_blocks == 1 and streams == 1 and not has_trees
    if is_one and shape.max_kv_len <= _AS_FAST:
        return None
    groups = shape.num_requests * int(call.attributes["num_kv_heads"]) * num_blocks
    splits = limits.num_sms // groups
    units = count_units(min(shape.max_kv_len, limits.max_seq_len))
    floats = groups * units * block_tokens * group * (size + 2)
    behind = max(most, shape.max_tree_len)  # keys from a root's on
    if splits < 2 or has_trees and behind > MAX_TREE or floats > partials[0].numel():
        return None
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
        block_tokens,
        short,
        streams,
        units,
        *trees,
    )
    grid = (splits, groups // shape.num_requests, shape.num_requests)
    return Launch(long_spec(call, limits, has_trees=has_trees), grid, arguments)


def long_spec(call: OpCall, limits: StepLimits, *, has_trees: bool) -> KernelSpec:
    """One binary."""
    size, group = int(call.attributes["head_size"]), group_size(call)
    words, constants = source_variant(call, limits)
    shared_bytes = SLOTS * (2 * KEYS * size * 2 + 4 * 8) + 2 * _MERGED_ROWS * _MERGED_UNITS * 16
    if has_trees:  # the window, queries, each token's rows of it, the last key that a row sees
        rows = WARPGROUPS * WARPGROUP_ROWS
        keys = WINDOW_TILES * KEYS
        tail = (
            2 * (keys * size + max(size, 128)) + rows * size * 2 + rows // group * keys + rows * 4
        )
        shared_bytes = -(-shared_bytes // 1024) * 1024 + tail
    constants |= {
        "WARPGROUPS": WARPGROUPS,
        "STAGES": SLOTS,
        "TREE": has_trees,
        "WINDOW_TILES": WINDOW_TILES,
        "SHARED_BYTES": shared_bytes,
    }
    return KernelSpec(
        name=".".join(["paged_attention.long", *words] + ["trees"] * has_trees),
        source="ops/paged_attention/long.cu",
        arguments=(
            *(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 5),
            *(("i32", "i32", *["*i32"] * 3, "i32") if has_trees else ()),
        ),
        constants=constants,
        entry="attend_long",
        num_warps=WARPS,
        shared_bytes=shared_bytes,
    )

"""The kernel for trees of tokens on few multiprocessors: binaries and launches of `tree.cu`.

It gives the bits of the other kernels. It supports the calls of chunk.cu whose caches have 8-bit
numbers, and reads a context tile after tile: it is for steps with so many rows that
verification.cu's thread blocks would not all run at once.
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
from llmctl.plugins.ops.paged_attention.batch.batch import covers_batch
from llmctl.plugins.ops.paged_attention.chunk.chunk import covers_chunks
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS
from llmctl.plugins.ops.paged_attention.verification.verification import (
    choose_tree_variant,
    is_faster_than_triton,
    tree_waves,
    verification_launch,
)

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

ROWS = 64  # of a thread block
STAGES = 3  # tiles of keys, and of values
# The time of a wave of thread blocks, microseconds: its start and end, and a tile; measured on an
# H100 up to MAX_CONTEXT tokens (docs/performance/trees.md).
_WAVE_US, _TILE_US = 7.0, 0.9
MAX_CONTEXT = 4096
# Rows of chains that the kernels that split contexts process in a microsecond, with 16 tiles.
_ROWS_PER_US = 128
WARPS = 16  # four that load, four that compute, eight for the keys behind the root
WINDOW_TILES = 3  # from the root's tile on
_DIVIDED = 128  # head size whose values' dimensions two thread blocks may share
MAX_TREE = (WINDOW_TILES - 1) * KEYS + 1  # keys: from any place in the root's tile


def covers_trees(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call."""
    has_pages = limits.tokens_per_block >= 8
    is_whole = 8 % group_size(call) == 0
    return covers_chunks(call, limits) and limits.kv_dtype == FP8 and is_whole and has_pages


def count_blocks(call: OpCall, num_requests: int, max_tokens: int) -> int:
    """Blocks of rows."""
    blocks = -(-max_tokens // (ROWS // group_size(call)))
    return num_requests * int(call.attributes["num_kv_heads"]) * blocks


def count_parts(call: OpCall, limits: StepLimits, num_requests: int, max_tokens: int) -> int:
    """Thread blocks that share a block of rows: two where all run at once, each with half of the
    values' dimensions."""
    blocks = count_blocks(call, num_requests, max_tokens)
    is_divided = int(call.attributes["head_size"]) == _DIVIDED and 2 * blocks <= limits.num_sms
    return 2 if is_divided else 1


def estimate_us(
    call: OpCall,
    limits: StepLimits,
    num_requests: int,
    max_tokens: int,
    max_kv_len: int,
    max_tree_len: int,
) -> float | None:
    """About how many microseconds a step takes with trees as in `choose_tree_variant`, or with
    chains; None where the kernel cannot compute it, or is not used."""
    if not covers_trees(call, limits) or max_tree_len > MAX_TREE or max_kv_len > MAX_CONTEXT:
        return None
    waves = -(-count_blocks(call, num_requests, max_tokens) // limits.num_sms)
    return waves * (_WAVE_US + _TILE_US * -(-max_kv_len // KEYS))


def fast_tree_launch(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    logit_scale: float,
    short: int,
) -> Launch | None:
    """How a step attends fastest for requests of up to `short` tokens, chains and trees: by this
    kernel or verification.cu. None where Triton's is faster, or no other can."""
    limits, requests, most = env.limits, shape.num_requests, min(shape.max_query_len, short)
    step = (call, limits, requests, most, shape.max_kv_len, max(most, shape.max_tree_len))
    found = choose_tree_variant(*step) if covers_batch(call, limits) else None
    own_us = estimate_us(*step)
    if own_us is not None and (found is None or own_us < found[1]):
        return tree_launch(call, env, requests, most, tensors, logit_scale, short, has_trees=True)
    if found is None:
        return None
    waves = tree_waves(found[0], call, limits, requests, most)
    if own_us is None and not is_faster_than_triton(waves, shape.max_kv_len):
        return None
    return verification_launch(call, env, found[0], requests, most, tensors, logit_scale, short)


def fast_chain_launch(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    logit_scale: float,
    short: int,
) -> Launch | None:
    """How a step of chains of up to `short` tokens attends where it has so many rows that this
    kernel is faster than those that split contexts; else None."""
    limits, requests, most = env.limits, shape.num_requests, min(shape.max_query_len, short)
    is_wave = count_blocks(call, requests, most) <= limits.num_sms  # more were not always faster
    if not limits.takes_trees or not is_wave:  # without trees engines have no binary of it
        return None
    own_us = estimate_us(call, limits, requests, most, shape.max_kv_len, most)
    rows = requests * most * int(call.attributes["num_heads"])
    other_us = rows / _ROWS_PER_US * (0.5 + -(-shape.max_kv_len // KEYS) / 32)
    if own_us is None or own_us >= other_us:
        return None
    return tree_launch(call, env, requests, most, tensors, logit_scale, short, has_trees=False)


def tree_launch(
    call: OpCall,
    env: LaunchEnv,
    num_requests: int,
    max_tokens: int,
    tensors: tuple[torch.Tensor, ...],
    logit_scale: float,
    short: int,
    *,
    has_trees: bool,
) -> Launch:
    """Attend for requests of up to max_tokens tokens; others serve those longer than `short`.

    has_trees: whether the step says where requests' trees are; otherwise all are chains.
    """
    step = env.step
    parts = count_parts(call, env.limits, num_requests, max_tokens)
    blocks = parts * count_blocks(call, num_requests, max_tokens)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        logit_scale,
        step.block_tables.stride(0),
        short,
        env.kv_cache[0].shape[0],
        min(call.inputs["q"].shape[0], step.position_ids.shape[0]),
        step.tree_start,
        step.tree_root,
        step.paths,
        step.paths.stride(0) if has_trees else 0,
    )
    grid = (1, blocks // num_requests, num_requests)
    return Launch(tree_spec(call, env.limits, parts), grid, arguments)


def tree_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The binaries, where a step may need them."""
    if not (limits.takes_trees and covers_trees(call, limits)):
        return []
    counts = (1, 2) if int(call.attributes["head_size"]) == _DIVIDED else (1,)
    return [tree_spec(call, limits, parts) for parts in counts]


def tree_spec(call: OpCall, limits: StepLimits, parts: int) -> KernelSpec:
    """One binary; `parts` as of `count_parts`."""
    size, group = int(call.attributes["head_size"]), group_size(call)
    words, constants = source_variant(call, limits)
    operand_bytes = KEYS * size * 2
    # Queries of two items, the rings, barriers and items as in chunk.cu; the tail's queries lie
    # where the second item's would.
    rings_bytes = STAGES * (operand_bytes + operand_bytes // parts)
    chunk_bytes = 2 * operand_bytes + rings_bytes + 8 * (4 * STAGES + 4) + 2 * 6 * 4 + 16
    window = WINDOW_TILES * KEYS
    window_bytes = 2 * (window * size + max(size, 128))
    handed_bytes = ROWS * (size // parts + 8) * 4 + ROWS * 8
    tail_bytes = window_bytes + handed_bytes + ROWS // group * window + ROWS * 4
    shared_bytes = -(-(chunk_bytes + 16) // 1024) * 1024 + tail_bytes
    return KernelSpec(
        name=".".join(["paged_attention.tree", *words, *(["halves"] if parts == 2 else [])]),
        source="ops/paged_attention/tree/tree.cu",
        arguments=(
            *tensor_types(call, limits),
            "fp32",
            *["i32"] * 4,
            *["*i32"] * 3,
            "i32",
        ),
        constants=constants
        | {
            "STAGES": STAGES,
            "WARPGROUPS": 1,
            "TREE": 1,
            "WINDOW_TILES": WINDOW_TILES,
            "PARTS": parts,
            "SHARED_BYTES": shared_bytes,
        },
        entry="tree",
        num_warps=WARPS,
        shared_bytes=shared_bytes,
    )

"""The kernel for few tokens at low latency: binaries and launches of `generation.cu`.

It gives the bits of the Triton kernels, so a step may use either. It supports head sizes 64 and 128
without windows and INT8 caches, and is used where few thread blocks have to be fast together; many
requests keep the GPU busy anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, count_units

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

SPLITS = 16  # thread blocks that share a block of query tokens, except in the shortest contexts
ROWS = 64  # of a thread block: one tensor-core instruction high
# Room for the work items that a thread block merges: 16 of 48 rows of head size 128, in clusters of
# 16. With the operands of that head size it leaves 152 KiB of a multiprocessor to a packed product.
PARTS_BYTES = 26112
GATHERED_BYTES = 432  # the step parameters in a thread block


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build the kernel."""

    splits: int  # thread blocks that share a block of query tokens
    # work items are sent through shared memory; else through global memory
    is_clustered: bool = True

    def __str__(self) -> str:
        return f"k{self.splits}" if self.is_clustered else f"g{self.splits}"


VARIANTS = (Variant(8), Variant(SPLITS), Variant(SPLITS, False))


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step is divided."""

    variant: Variant
    num_blocks: int  # of rows, per request
    block_tokens: int


def covers(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call."""
    page = limits.tokens_per_block
    return (
        int(call.attributes["head_size"]) in (64, 128)
        and int(call.attributes["window"]) == 0
        and limits.kv_dtype != "int8"
        and page > 1
        and page & (page - 1) == 0
    )


def generation_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `choose_cut` may ask for in a step within the limits."""
    size, heads = int(call.attributes["head_size"]), int(call.attributes["num_kv_heads"])
    most = limits.max_batch_size * _count_blocks(call, most_short_tokens(limits))
    longest = count_units(limits.max_seq_len)
    reached = {
        _choose_variant(size, blocks * heads, units, limits.num_sms)
        for blocks in range(1, most + 1)
        for units in (1, longest)
    }
    return [generation_spec(call, limits, each) for each in VARIANTS if each in reached]


def choose_cut(
    call: OpCall, num_requests: int, max_tokens: int, max_kv_len: int, num_sms: int
) -> Cut | None:
    """How to run such a step; None if another kernel serves it better."""
    size, heads = int(call.attributes["head_size"]), int(call.attributes["num_kv_heads"])
    num_blocks = _count_blocks(call, max_tokens)
    groups = num_requests * heads * num_blocks
    variant = _choose_variant(size, groups, count_units(max_kv_len), num_sms)
    return None if variant is None else Cut(variant, num_blocks, -(-max_tokens // num_blocks))


def _count_blocks(call: OpCall, max_tokens: int) -> int:
    """Thread blocks of rows of a request."""
    return -(-max_tokens // (ROWS // group_size(call)))


def _choose_variant(size: int, groups: int, units: int, num_sms: int) -> Variant | None:
    # Clusters of 16 find room on few groups of SMs, and one more than those that run at once costs
    # as much as all. On an H200 seven groups have 16 or 18 SMs: 14 clusters with two thread blocks
    # to an SM, 21 with three. Blocks without clusters wait for each other, and two fit an SM.
    if units <= 8 and groups <= 16:
        return Variant(8)
    if groups <= 8 * (_blocks_per_sm(size) - 1):
        return Variant(SPLITS)
    return Variant(SPLITS, False) if groups * SPLITS <= 2 * num_sms else None


def _blocks_per_sm(size: int) -> int:
    """What registers allow: head size 128 holds 64 sums a thread."""
    return 3 if size == 64 else 2


def _registers(size: int, kv_dtype: str) -> int:
    """Most registers of a thread: with 200, two blocks leave room for one of a packed product."""
    if size == 64:
        return 168
    return 200 if kv_dtype == FP8 else 248


def generation_launch(
    call: OpCall,
    env: LaunchEnv,
    cut: Cut,
    num_requests: int,
    tensors: tuple[torch.Tensor, ...],
    partials: tuple[torch.Tensor, torch.Tensor],
    logit_scale: float,
    max_tokens: int,
) -> Launch | None:
    """Attend for requests of up to max_tokens tokens; None if `partials` are too small.

    partials: room for work items, and a line of 32 counters for each block of rows, of which one is
    used; it is zero before and after.
    """
    heads, size = int(call.attributes["num_kv_heads"]), int(call.attributes["head_size"])
    cache = env.kv_cache[0]
    chunks = cut.block_tokens * group_size(call) * (size // 64)
    stride = count_units(env.limits.max_seq_len) * chunks * (64 + 2)
    stride += -stride % 4
    grid = (cut.variant.splits, heads * cut.num_blocks, num_requests)
    groups = grid[1] * grid[2]
    if groups * stride > partials[0].numel() or 32 * groups > partials[1].numel():
        return None
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        *partials,
        logit_scale,
        env.step.block_tables.stride(0),
        cut.block_tokens,
        max_tokens,
        cache.shape[0],
        min(call.inputs["q"].shape[0], env.step.position_ids.shape[0]),
        stride,
    )
    return Launch(generation_spec(call, env.limits, cut.variant), grid, arguments)


def generation_spec(call: OpCall, limits: StepLimits, variant: Variant) -> KernelSpec:
    """One binary."""
    size = int(call.attributes["head_size"])
    words, constants = source_variant(call, limits)
    parts_bytes = PARTS_BYTES if variant.is_clustered else 0
    constants |= {
        "SPLITS": variant.splits,
        "CLUSTERED": variant.is_clustered,
        "PARTS_BYTES": parts_bytes,
        "GATHERED_BYTES": GATHERED_BYTES,
        "REGISTERS": _registers(size, limits.kv_dtype),
    }
    return KernelSpec(
        name=".".join(["paged_attention.few", *words, str(variant)]),
        source="ops/paged_attention/generation/generation.cu",
        arguments=(*tensor_types(call, limits), "*fp32", "*i32", "fp32", *["i32"] * 5, "i64"),
        constants=constants,
        entry="generation",
        num_warps=4,
        shared_bytes=3 * KEYS * size * 2 + parts_bytes + 16 + GATHERED_BYTES,
        cluster=variant.splits if variant.is_clustered else 1,
    )

"""The kernel for context chunks: binaries and launches of `chunk.cu`.

It gives the bits of the Triton context kernel, which is used for what it does not support: windows,
token trees, INT8 caches, page sizes that are no power of two, and head sizes 80, 96 and 64 (where
it is no faster).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.ops.paged_attention.generation import covers
from llmctl.plugins.ops.paged_attention.source_specs import group_size, source_variant, tensor_types
from llmctl.plugins.ops.paged_attention.tiles import KEYS

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

WARPGROUPS = 2  # one tensor-core instruction high each
ROWS = 64 * WARPGROUPS  # of an item
_MOST_STAGES = 6  # tiles of keys, and of values, on their way
_MIN_REQUESTS = 64  # fewer do not make another binary
_MOST_REQUESTS = 4096  # 16 bytes each; leaves room for three tiles


def covers_chunks(call: OpCall, limits: StepLimits) -> bool:
    """Whether the kernel can compute this call for requests of any length."""
    is_wide = int(call.attributes["head_size"]) == 128
    return is_wide and limits.max_batch_size <= _MOST_REQUESTS and covers(call, limits)


def chunk_launch(
    call: OpCall,
    env: LaunchEnv,
    num_tokens: int,
    num_requests: int,
    tensors: tuple[torch.Tensor, ...],
    counters: torch.Tensor,
    logit_scale: float,
    min_tokens: int,
) -> Launch:
    """Attend for requests of at least min_tokens tokens.

    counters: the first counts items that were taken; zero before and after.
    """
    blocks = num_tokens // (ROWS // group_size(call)) + num_requests  # or fewer
    items = blocks * int(call.attributes["num_kv_heads"])
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *tensors,
        counters,
        logit_scale,
        env.step.block_tables.stride(0),
        num_requests,
        min_tokens,
    )
    grid = (min(items, env.limits.num_sms), 1, 1)
    return Launch(chunk_spec(call, env.limits), grid, arguments)


def chunk_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """The one binary."""
    size = int(call.attributes["head_size"])
    words, constants = source_variant(call, limits)
    requests = max(_MIN_REQUESTS, 1 << (limits.max_batch_size - 1).bit_length())
    operand_bytes = KEYS * size * 2
    stage_bytes = 2 * operand_bytes + 4 * 8  # keys and values, and their barriers
    # Queries of two items; the items, their barriers, the next item, the requests and one more.
    fixed_bytes = 4 * operand_bytes + 2 * 6 * 4 + 4 * 8 + 16 + 16 * (requests + 1)
    stages = min((HOPPER.max_shared_bytes - fixed_bytes) // stage_bytes, _MOST_STAGES)
    return KernelSpec(
        name=".".join(["paged_attention.chunk", *words, f"b{requests}"]),
        source="ops/paged_attention/chunk.cu",
        arguments=(*tensor_types(call, limits), "*i32", "fp32", *["i32"] * 3),
        constants=constants | {"STAGES": stages, "WARPGROUPS": WARPGROUPS},
        entry="chunk",
        num_warps=4 + ROWS // 16,
        shared_bytes=fixed_bytes + stages * stage_bytes,
    )

"""FP8 products for requests of few tokens: binaries and launches of `few_fp8.cu`.

Engines whose generation has FP8 products compute with it every request that chunk_fp8.cu leaves:
one token or several, short contexts or long ones. Both have the arithmetic of
chunk_fp8/reference.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
    TensorMap,
)
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import (
    CHAIN,
    KEYS,
    MOST_UNIT,
    RAISE,
    UNIT,
    WEIGHT_POWER,
)
from llmctl.plugins.ops.paged_attention.few_fp8.cut import ROWS, Cut, choose_cut, cuts
from llmctl.plugins.ops.paged_attention.few_fp8.plan import plan_room
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    most_short_tokens,
    source_variant,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

_LINE = 128  # bytes of a key or a value, and of a row of weights
_TILE_BYTES = KEYS * _LINE  # of keys, or values
_COLUMN_BYTES = 4 * 13  # what the kernel knows of each row
_FIXED_BYTES = 2048  # ones, barriers, and what a thread block has of which context
_ROOM_BYTES = 256 << 20  # for work items of contexts that are shared


def few_fp8_specs(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that `few_fp8_launch` may ask for."""
    most = most_short_tokens(limits)
    sizes = {cut.rows for tokens in range(1, most + 1) for cut in cuts(call, tokens)}
    return [few_fp8_spec(call, limits, rows) for rows in sorted(sizes)]


def few_fp8_numbers(call: OpCall, limits: StepLimits) -> int:
    """Room for the partial results of contexts that thread blocks share, in float32 numbers: those
    of as many requests as there are thread blocks for, up to _ROOM_BYTES, but of one at least."""
    most = most_short_tokens(limits)
    largest = max((cuts(call, tokens)[-1] for tokens in range(1, most + 1)), key=_size)
    heads = int(call.attributes["num_kv_heads"])
    items = count_units(limits.max_seq_len, MOST_UNIT, UNIT, KEYS)
    entry = largest.rows * (_LINE + 2)
    request = -(-most // largest.tokens) * heads * (items + 1)
    requests = min(limits.max_batch_size, max(limits.num_sms // heads, 1))
    return entry * (
        limits.num_sms + max(request, min(requests * request, _ROOM_BYTES // 4 // entry))
    )


def few_fp8_launch(
    call: OpCall,
    env: LaunchEnv,
    shape: StepShape,
    tensors: tuple[torch.Tensor, ...],
    partials: tuple[torch.Tensor, torch.Tensor],
    logit_scale: float,
    short: int,
) -> Launch:
    """Attend for requests of up to `short` tokens.

    partials: room for work items of contexts that thread blocks share, and their counters, which
    are zero before and after.
    """
    limits, step = env.limits, env.step
    tokens = min(shape.max_query_len, short)
    cut = choose_cut(call, tokens, shape.num_requests, shape.max_kv_len, limits.num_sms)
    # Boxes of the caches of all layers: launches of other layers are copies of this one, in which
    # only the layer's own tensors are others. What begins where a layer's cache does would be taken
    # for one of them (rebinding.py), so the kernel is told where the second line is.
    all_layers = env.kv_cache
    second_line = all_layers.view(-1)[_LINE:]
    keys = min(limits.tokens_per_block, KEYS)
    boxes = TensorMap(all_layers.view(torch.uint8).view(-1, _LINE), keys, _LINE)
    partial, counters = partials
    spec = few_fp8_spec(call, limits, cut.rows)
    name, heads = "paged_attention.few_fp8", int(call.attributes["num_kv_heads"])
    arguments: tuple[torch.Tensor | TensorMap | int | float, ...] = (
        *tensors[:5],
        boxes,
        second_line,
        *tensors[5:],
        partial,
        counters,
        logit_scale,
        step.block_tables.stride(0),
        cut.tokens,
        short,
        partial.numel() // (cut.rows * (_LINE + 2)),
        shape.num_requests,
        *plan_room(env, f"{name}.h{heads}", limits.num_sms, len(ROWS), ROWS.index(cut.rows)),
    )
    return Launch(spec, (limits.num_sms, 1, 1), arguments)


def _size(cut: Cut) -> tuple[int, int]:
    return cut.rows, cut.tokens


def few_fp8_spec(call: OpCall, limits: StepLimits, rows: int) -> KernelSpec:
    """One binary."""
    words, constants = source_variant(call, limits)
    # Queries, weights of two tiles, what is merged; and slots of tiles of keys and of values.
    own_bytes = rows * (7 * _LINE + _COLUMN_BYTES) + _FIXED_BYTES
    slots = (HOPPER.max_shared_bytes - own_bytes) // (2 * _TILE_BYTES)
    shared_bytes = own_bytes + 2 * slots * _TILE_BYTES
    return KernelSpec(
        name=".".join(["paged_attention.few_fp8", *words, f"r{rows}"]),
        source="ops/paged_attention/few_fp8/few_fp8.cu",
        arguments=(
            *tensor_types(call, limits)[:5],
            *("tensor_map", pointer(limits.kv_dtype)),
            *tensor_types(call, limits)[5:],
            *("*fp32", "*i32", "fp32", *["i32"] * 5, "*i64", "i32"),
        ),
        constants=constants
        | {
            "FP8_PRODUCTS": 1,
            "TILE_KEYS": KEYS,
            "UNIT": UNIT,
            "MOST_UNIT": MOST_UNIT,
            "CHAIN": CHAIN,
            "ROWS": rows,
            "SLOTS": slots,
            "FACTOR_ROOM": 2 * slots * _TILE_BYTES // (4 * (3 * rows + 4)),
            "RAISE": f"{RAISE}f",
            "WEIGHT_POWER": f"{WEIGHT_POWER}f",
            "SHARED_BYTES": shared_bytes,
        },
        entry="few_fp8",
        num_warps=12,
        shared_bytes=shared_bytes,
    )

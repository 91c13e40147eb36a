"""The packed products for many tokens: which binaries, and how a step launches them.

A variant is a tile shape. `choose` picks the one whose waves of tiles over the multiprocessors take
the least time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.ops.packed_linear.arguments import (
    argument_kinds,
    argument_values,
    form_of,
    is_fp8,
    keeps_best,
    name_of,
    scales_tokens,
    token_map,
    type_constants,
    type_words,
)
from llmctl.plugins.ops.packed_linear.expansion import expand_launch, expand_spec, expanded_call
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

_BLOCK_BYTES = 8192
_BARRIER_BYTES = 16  # full and empty, of one slot
_STAGING_BYTES = 8192  # of a warpgroup
_TOKEN_BYTES = 8  # of a token and warpgroup: scale and position


@dataclass(frozen=True, slots=True)
class Variant:
    """Tile shape and shared memory of one binary.

    A tile is 64 * warpgroups * wg_tiles weight rows by `tokens`.
    """

    wg_tiles: int
    tokens: int
    a_stages: int  # slots of one packed block per warpgroup
    b_stages: int  # slots of one token tile of 128 bytes; with one row tile as many
    is_even: bool = False  # every thread block has the same part of all intervals of K
    warpgroups: int = 2  # that multiply; another one feeds them
    # Thread blocks that neighbouring multiprocessors run, of which the kernel knows nothing: steps
    # of up to a few hundred tokens are 1 to 2 % faster in pairs, prompts 2 % slower.
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.warpgroups * TILE_ROWS * self.wg_tiles

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        slots = self.a_stages * self.warpgroups * _BLOCK_BYTES + self.b_stages * self.tokens * 128
        barriers = _BARRIER_BYTES * (self.a_stages + self.b_stages)
        return slots + self.warpgroups * (_STAGING_BYTES + _TOKEN_BYTES * self.tokens) + barriers

    @property
    def name(self) -> str:
        """Rows x tokens, and whether blocks have equal shares."""
        return f"{self.rows}x{self.tokens}" + "even" * self.is_even


WIDE = Variant(wg_tiles=2, tokens=128, a_stages=6, b_stages=7)
SQUARE = Variant(wg_tiles=1, tokens=128, a_stages=6, b_stages=6)
WIDE_120 = Variant(wg_tiles=2, tokens=120, a_stages=6, b_stages=7, cluster=2)
WIDE_96 = Variant(wg_tiles=2, tokens=96, a_stages=7, b_stages=8, cluster=2)
NARROW = Variant(wg_tiles=1, tokens=64, a_stages=8, b_stages=8, cluster=2)
SLIM = Variant(wg_tiles=1, tokens=128, a_stages=9, b_stages=9, warpgroups=1, cluster=2)
LONG = Variant(wg_tiles=1, tokens=256, a_stages=4, b_stages=4)
THIN = Variant(wg_tiles=1, tokens=64, a_stages=12, b_stages=12, warpgroups=1)
EVEN_120, EVEN_SQUARE, EVEN_NARROW, EVEN_THIN = (
    replace(each, is_even=True, cluster=1) for each in (WIDE_120, SQUARE, NARROW, THIN)
)


# Products a multiprocessor finishes per unit of time, relative to the widest tile (H200).
_SPEED = {WIDE: 1.0, LONG: 1.0, SQUARE: 0.95, EVEN_SQUARE: 0.9}
_SPEED |= {WIDE_120: 0.97, EVEN_120: 0.97, WIDE_96: 0.87}  # as shared memory is read
_SPEED |= {NARROW: 0.68, EVEN_NARROW: 0.66, SLIM: 0.74, THIN: 0.59, EVEN_THIN: 0.62}
_INTERVAL = 4  # chunks of a weight that are added before others
_HANDOVER = 6  # intervals that it takes longer where sums are left to the next block
_CHAIN_HANDOVER = 5  # chunks that it takes longer where a chain goes on with such sums
_MOST_EVEN_TOKENS = 1024  # of a step with equal shares; of more there are many tiles


def variants_of(call: OpCall) -> tuple[Variant, ...]:
    """The tile shapes a call can use.

    A FP8 sum takes twice the registers, so 256 tokens are not held at once; float32 outputs, few as
    they are, have no wide tiles, and those that rotate would need more registers than there are.
    Of small tiles those of one warpgroup are faster, for 64 tokens thin ones. Tiles of 96 and 120
    tokens, where most of the time is theirs, are for steps that are one.
    """
    if not is_fp8(call):  # logits that are not stored leave room for wide tiles
        best = (LONG, WIDE, EVEN_120, SQUARE, NARROW)
        return best if keeps_best(call) else (LONG, SQUARE, NARROW)
    if name_of(next(iter(call.outputs.values()))) == "float32":
        return SQUARE, NARROW
    if call.op == "packed_linear_swiglu":  # of many tiles, so that few tokens alone leave a rest
        return WIDE, WIDE_120, WIDE_96, SQUARE, NARROW, EVEN_NARROW
    if call.op == "packed_linear_rope_kv":
        return SQUARE, EVEN_SQUARE, NARROW, THIN, EVEN_THIN
    return WIDE, SQUARE, EVEN_SQUARE, SLIM, THIN


def choose(call: OpCall, num_tokens: int, num_sms: int) -> Variant:
    """The tile shape for a step of this many tokens: tiles that a multiprocessor computes times
    what a tile costs."""
    row_tiles, chunks = call.inputs["weight"].shape[:2]

    def cost(variant: Variant) -> float:
        if variant.is_even and num_tokens > _MOST_EVEN_TOKENS:
            return math.inf
        if variant.tokens % TILE_ROWS and num_tokens > variant.tokens:
            return math.inf
        if variant.rows == variant.tokens == TILE_ROWS < num_tokens:
            return math.inf  # it reads as many bytes of tokens as of weights
        units = _units(variant, num_tokens, row_tiles)
        blocks = _blocks(variant, num_tokens, row_tiles, num_sms)
        each = float(-(-units // blocks))
        if variant.is_even:
            if blocks == units:
                return math.inf
            handover = _HANDOVER * _INTERVAL if is_fp8(call) else _CHAIN_HANDOVER
            each = units / blocks + handover / chunks
        return each * variant.rows * variant.tokens / _SPEED[variant]

    return min(variants_of(call), key=cost)


def _units(variant: Variant, num_tokens: int, row_tiles: int) -> int:
    """Tiles of a step."""
    return _row_blocks(variant, row_tiles) * -(-num_tokens // variant.tokens)


def _row_blocks(variant: Variant, row_tiles: int) -> int:
    return -(-row_tiles * TILE_ROWS // variant.rows)


def _blocks(variant: Variant, num_tokens: int, row_tiles: int, num_sms: int) -> int:
    """Thread blocks of a launch, in whole clusters, so that one may have no tile. With equal shares
    as many of each token tile, and none with less than a tile."""
    if not variant.is_even:
        units = _units(variant, num_tokens, row_tiles)
        return -(-min(num_sms, units) // variant.cluster) * variant.cluster
    token_tiles = -(-num_tokens // variant.tokens)
    return token_tiles * min(num_sms // token_tiles, _row_blocks(variant, row_tiles))


def prefill_kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that steps of many tokens may need."""
    if not form_of(call).is_coded:
        return [prefill_spec(call, variant, limits) for variant in variants_of(call)]
    fp8 = expanded_call(
        call, lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    )
    specs = [prefill_spec(fp8, variant, limits, is_expanded=True) for variant in variants_of(fp8)]
    return [expand_spec(call), *specs]


def prefill_spec(
    call: OpCall, variant: Variant, limits: StepLimits, *, is_expanded: bool = False
) -> KernelSpec:
    """The binary of one call and tile shape. is_expanded: `expand_launch` makes its weight."""
    words = (call.op, "many", variant.name, *["expanded"] * is_expanded)
    words += ("per_token",) * scales_tokens(call)
    handed = ("*fp32", "*i32") if variant.is_even else ()
    return KernelSpec(
        name=".".join((*words, *type_words(call, limits))),
        source="ops/packed_linear/prefill.cu",
        arguments=("tensor_map", *argument_kinds(call, limits), *handed),
        constants={
            **type_constants(call, limits),
            "EXPANDED": int(is_expanded),
            "WG_TILES": variant.wg_tiles,
            "TILE_TOKENS": variant.tokens,
            "A_STAGES": variant.a_stages,
            "B_STAGES": variant.b_stages,
            "EVEN": int(variant.is_even),
            "WARPGROUPS": variant.warpgroups,
            "HAS_BIAS": int("bias" in call.inputs),
            "PER_TOKEN": int(scales_tokens(call)),
        },
        entry="prefill",
        num_warps=4 * (variant.warpgroups + 1),
        shared_bytes=variant.shared_bytes,
        cluster=variant.cluster,
    )


def prefill_launches(call: OpCall, env: LaunchEnv, tokens: int) -> list[Launch]:
    """Multiply the first `tokens` rows of `x`; numbers of codes are made before."""
    if not form_of(call).is_coded:
        return [prefill_launch(call, env, tokens)]
    expanded = expanded_call(call, env.scratch)
    launch = prefill_launch(expanded, env, tokens, is_expanded=True)
    return [expand_launch(call, expanded), launch]


def prefill_launch(
    call: OpCall,
    env: LaunchEnv,
    tokens: int,
    variant: Variant | None = None,
    *,
    is_expanded: bool = False,
) -> Launch:
    """The launch with one weight; without a variant, that which `choose` names."""
    row_tiles, num_sms = call.inputs["weight"].shape[0], env.limits.num_sms
    if variant is None:
        variant = choose(call, tokens, num_sms)
    blocks = _blocks(variant, tokens, row_tiles, num_sms)
    arguments = (token_map(call, variant.tokens), *argument_values(call, env, tokens))
    if any(
        each.is_even for each in variants_of(call)
    ):  # asked for whatever is chosen: it is planned for
        rooms = _handover_rooms(env)
        arguments += rooms if variant.is_even else ()
    return Launch(
        prefill_spec(call, variant, env.limits, is_expanded=is_expanded), (blocks, 1, 1), arguments
    )


def _handover_rooms(env: LaunchEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """For the sums that thread blocks leave to the next, of the largest tile, and flags of their
    warps."""
    num_sms, tile = env.limits.num_sms, EVEN_120
    return (
        env.scratch("packed_linear.left", (num_sms, tile.rows * tile.tokens), torch.float32),
        env.scratch("packed_linear.is_left", (num_sms, 4 * tile.rows // TILE_ROWS), torch.int32),
    )

"""Decoder layers of a step with one or two tokens in one launch: binary and launch of `layers.cu`.

It is not an operator of a plan: a chain is a range of calls whose layers have a form that layers.cu
supports, and in such steps of one request one launch replaces theirs, with the same bits. It does
not store intermediate results, which only the replaced calls would read. The shapes for which it is
faster are in tactics.json (`tactics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    PointerTable,
    StepLimits,
    StepShape,
    TensorMap,
)
from llmctl.plugins.fused.decoder_layers.chain import Layer, find_layers, layer_fields, read_layers
from llmctl.plugins.fused.decoder_layers.room import COLUMNS, ROW, Room, find_room
from llmctl.plugins.fused.decoder_layers.tactics import (
    EVERYWHERE,
    NAME,
    Tactic,
    measured_tactics,
    shape_key,
    stored_tactic,
)
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT, count_units
from llmctl.plugins.schemes.table import form_macros

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall
    from llmctl.plugins.core.fused_calls import FusedCalls

_WARPS = 12  # of a block: eight compute, four copy
_LINE = 32  # ints from one counter to the next
_TYPES = {"bfloat16": "BF16", "float16": "FP16", "float8_e4m3fn": "E4M3", "int8": "INT8"}

TOKENS = (1, 2)  # of a step; a draft's first step of a round may have two
ByTokens = Mapping[int, Sequence[Tactic]]


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls `start` to `stop` (exclusive) of a program, which are whole layers."""

    start: int
    stop: int
    layers: tuple[Layer, ...]
    tokens: int  # the most of a step
    room: Room
    tactic: Tactic

    @property
    def is_whole(self) -> bool:
        """Whether the model's last layer is in it: then one token of a step gets logits."""
        return bool(self.layers[-1].gathers)


def find_chains(
    calls: Sequence[OpCall], limits: StepLimits, given: ByTokens | None = None
) -> list[Chain]:
    """The chains that are faster than separate launches in some steps, for each number of tokens,
    ascending, first those that include the last layer. given: tactics (None: those measured)."""
    layers, found = find_layers(calls, limits), []
    tactics = given or {n: measured_tactics(layers[0], n) for n in TOKENS if layers}
    for tokens, whole in product(TOKENS, (True, False)):
        for tactic in tactics.get(tokens, ()):
            chain = find_chain(layers, limits, most_tokens=tokens, tactic=tactic, whole=whole)
            found += [] if chain is None else [chain]
    return found


def open_chains(
    calls: Sequence[OpCall], limits: StepLimits, fused: Sequence[FusedCalls]
) -> list[Chain]:
    """The chains of an engine as it was built. Raises CorruptEngine where the calls named are not
    whole layers that such a kernel computes, or another version of llmctl named it."""
    return [_open_chain(calls, limits, each) for each in fused]


def _open_chain(calls: Sequence[OpCall], limits: StepLimits, fused: FusedCalls) -> Chain:
    layers = read_layers(calls, fused.start, fused.stop, limits)
    if layers and (stored := stored_tactic(fused.kernel)):
        tokens, tactic = stored
        room = find_room(layers[0], limits, tokens, tactic)
        if room is not None:
            chain = Chain(fused.start, fused.stop, tuple(layers), tokens, room, tactic)
            if tokens in TOKENS and chain_spec(chain, limits).name == fused.kernel:
                return chain
    raise CorruptEngine(
        f"operators {fused.start} to {fused.stop} of the plan are not layers that "
        f"{fused.kernel!r} computes",
        fix="build the engine again",
    )


def find_chain(
    layers: Sequence[Layer],
    limits: StepLimits,
    *,
    most_tokens: int = 1,
    tactic: Tactic = EVERYWHERE,
    whole: bool = False,
) -> Chain | None:
    """A run of layers in steps of up to `most_tokens` tokens; None where layers.cu does not cover
    two of them, or where one launch is nowhere faster. `whole`: with a last layer of which rows are
    gathered, for steps of which one token gets logits; None where there is none."""
    found = [layer for layer in layers if whole or not layer.gathers]
    if len(found) < 2 or (whole and not found[-1].gathers):
        return None
    room = find_room(found[0], limits, most_tokens, tactic)
    if room is None or not tactic.gains_within(limits.max_seq_len):
        return None
    return Chain(found[0].start, found[-1].stop, tuple(found), most_tokens, room, tactic)


def chain_spec(chain: Chain, limits: StepLimits) -> KernelSpec:
    """The binary of a chain, one for all its layers. Its name tells the tactic."""
    layer, room, tactic = chain.layers[0], chain.room, chain.tactic
    shares = layer.shares(limits.num_sms)
    words = [NAME, shape_key(layer)]
    words += [short_name(layer.dtype), f"kv_{short_name(limits.kv_dtype)}"]
    words += [f"page{limits.tokens_per_block}", f"u{_max_units(limits, tactic)}"]
    words += [f"n{chain.tokens}", f"s{room.stages}t{room.slots}g{limits.num_sms}"]
    words += tactic.words()
    return KernelSpec(
        name=".".join(words),
        source="fused/decoder_layers/layers.cu",
        arguments=(
            *("*i64", "i32", "i32", "*fp8e4nv", pointer(layer.dtype), pointer(layer.dtype)),
            *(pointer(layer.dtype), "*i32", "i32", "*fp32", *["*i32"] * 5, "*u8", "*i32"),
            *("fp32", "fp32", "i32", "i32"),
            *(("tensor_map", pointer(limits.kv_dtype)) if tactic.is_long else ()),
        ),
        constants={
            **form_macros(layer.weights),
            "MODEL_TYPE": _TYPES[layer.dtype],
            "KV_TYPE": _TYPES[limits.kv_dtype],
            "HIDDEN": layer.hidden,
            "INTERMEDIATE": layer.intermediate,
            "NUM_HEADS": layer.num_heads,
            "NUM_KV_HEADS": layer.num_kv_heads,
            "HEAD_SIZE": layer.head_size,
            "TOKENS_PER_BLOCK": limits.tokens_per_block,
            "O_GROUP": shares[1].group_rows,
            "DOWN_GROUP": shares[3].group_rows,
            "TOKENS": chain.tokens,
            "NUM_BLOCKS": limits.num_sms,
            "STAGES": room.stages,
            "IN_FLIGHT_SMALL": tactic.pace.small,
            "IN_FLIGHT_AHEAD": tactic.pace.ahead,
            "IN_FLIGHT": tactic.pace.other,
            "EARLY_QKV": tactic.pace.early,
            "HELD": tactic.pace.held,
            "ROOM": room.work,
            "SLOTS": room.slots,
            "MAX_UNITS": _max_units(limits, tactic),
            "MOST_UNIT": MOST_UNIT,
            "EXCHANGE_BYTES": exchange_bytes(chain, limits),
        },
        entry="layers",
        num_warps=_WARPS + 4 * (tactic.pace.held > 0),
        shared_bytes=room.num_bytes,
    )


def serves(chain: Chain, env: LaunchEnv, shape: StepShape) -> bool:
    """Whether the chain's launch takes the place of its calls in steps of this shape."""
    return (
        env.use_pdl
        and shape.num_requests == 1
        and shape.max_tree_len == 0
        and shape.num_tokens == chain.tokens
        and (shape.num_rows == 1 or not chain.is_whole)
        and chain.tactic.gains_at(shape.max_kv_len)
    )


def chain_launches(
    chain: Chain, chains: Sequence[Chain], env: LaunchEnv, shape: StepShape
) -> list[Launch]:
    """What a step launches that a chain, one of an engine's, serves. A draft's first step of a
    round may have one token and padding, as only the device knows: then one of two computes it."""
    ahead = [c for c in chains if c.tokens < chain.tokens and c.is_whole and chain.is_whole]
    ahead = [c for c in ahead if c.tactic.gains_at(shape.max_kv_len)]
    return [chain_launch(c, env, shape, bool(ahead)) for c in (*ahead[:1], chain)]


def chain_launch(
    chain: Chain, env: LaunchEnv, shape: StepShape, is_one_of_two: bool = False
) -> Launch:
    """All layers for the first tokens of one request; is_one_of_two: if they are chain.tokens."""
    first, last, limits, step = chain.layers[0], chain.layers[-1], env.limits, env.step
    words = [field for each in chain.layers for field in layer_fields(each, env.kv_cache)]
    num_bytes, units = exchange_bytes(chain, limits), _max_units(limits, chain.tactic)
    own = f"{NAME}.n{chain.tokens}.u{units}"  # memory that one binary keeps between its launches
    return Launch(
        chain_spec(chain, limits),
        (limits.num_sms, 1, 1),
        (
            PointerTable(tuple(words)),
            len(chain.layers),
            min(shape.num_tokens, chain.tokens),
            first.qkv.inputs["x"],
            first.mlp_norm.inputs["residual"],
            last.down.outputs["out"],
            last.mlp_norm.outputs["residual_out"],
            step.logit_rows,
            int(chain.is_whole),
            first.rotary,
            step.position_ids,
            step.slot_mapping,
            step.cu_q,
            step.kv_len,
            step.block_tables,
            env.scratch(f"{own}.exchange", (num_bytes,), torch.uint8),
            env.scratch(f"{own}.counters", (_LINE * (2 + first.num_kv_heads),), torch.int32),
            first.epsilon,
            first.logit_scale,
            step.block_tables.stride(0),
            int(is_one_of_two),
            *(_cache_map(env) if chain.tactic.is_long else ()),
        ),
    )


def _cache_map(env: LaunchEnv) -> tuple[TensorMap, torch.Tensor]:
    """The whole cache as rows of 128 bytes, in boxes of a head's keys of a page or of a tile."""
    cache, limits = env.kv_cache, env.limits
    keys = min(limits.tokens_per_block, KEYS)
    line = cache.shape[-1] * cache.element_size()
    return TensorMap(cache.view(torch.uint8).view(-1, ROW), keys * line // ROW, ROW), cache


def exchange_bytes(chain: Chain, limits: StepLimits) -> int:
    """Global memory of exchange.cuh: two buffers."""
    layer = chain.layers[0]
    itemsize: int = getattr(torch, limits.kv_dtype).itemsize
    cached = 2 * layer.num_kv_heads * layer.head_size * itemsize
    row = 3 * layer.attended + cached + 4 * layer.hidden + layer.intermediate
    states = layer.num_kv_heads * _max_units(limits, chain.tactic) * COLUMNS
    return 2 * (chain.tokens * row + states * (8 + 4 * layer.head_size))


def _max_units(limits: StepLimits, tactic: Tactic) -> int:
    return count_units(-(-min(tactic.reach, limits.max_seq_len) // KEYS) * KEYS)

"""How a thread block of layers.cu divides its shared memory, and for which layers that suffices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
    from llmctl.plugins.fused.decoder_layers.chain import Layer
    from llmctl.plugins.fused.decoder_layers.tactics import Tactic

COLUMNS = 8  # attention rows of a team of four warps
ROW = 128  # bytes of the copy engine's pattern, of which eight rows are a whole one
_MIN_STAGES, _MAX_RING_BYTES = 4, 6 * 32768
_TEAMS = 2  # teams of four warps in a block that process attention work items
_FINISHED = 32  # sums (row group, token) that a block finishes at once
_LAYER_BYTES = 23 * 8  # `Layer` in chain.cuh
_LONG_STAGES = 6  # of the ring, the least for long contexts
_MERGED_BYTES = 32 << 10  # of shared memory, for what is merged of long contexts
_MOST_SLICED = 32  # pairs of dimensions that a block merges of long contexts


@dataclass(frozen=True, slots=True)
class Room:
    """How a thread block divides its shared memory, bytes."""

    unit: int  # of the ring
    table: int  # the 4-bit numbers
    work: int  # tokens and sums, or keys and values
    stages: int  # slots of the ring
    slots: int  # per team, for tiles of keys and values

    @property
    def num_bytes(self) -> int:
        """Alignment, table, ring and its barriers, work, sums of squares, two layers' addresses."""
        ring = self.stages * (self.unit + 40)
        return 1024 + self.table + ring + self.work + 256 + 2 * _LAYER_BYTES + 32


def find_room(layer: Layer, limits: StepLimits, tokens: int, tactic: Tactic) -> Room | None:
    """None where layers.cu cannot serve so many tokens, or contexts so long."""
    if tokens * layer.group > COLUMNS:
        return None
    shares = layer.shares(limits.num_sms)
    if max(share.groups for share in shares) * tokens > _FINISHED:
        return None
    work = max(share.token_bytes(tokens) + share.sum_bytes(tokens) for share in shares)
    itemsize: int = getattr(torch, limits.kv_dtype).itemsize
    tiles = _TEAMS * 2 * KEYS * layer.head_size * itemsize
    form = layer.weights
    unit = form.interval * form.block_bytes  # 16 rows at four intervals of 512 of K, or 8 at eight
    if tactic.is_long:
        return _long_room(layer, limits, tokens, tactic, work)
    queries = 0
    if form.is_coded and tokens == 1:  # landing.cuh
        queries = _TEAMS * layer.head_size * 2 * (layer.group + itemsize)
        landing = max(shares[0].token_bytes(1), shares[2].token_bytes(1)) + 2 * layer.hidden
        work = max(work, landing)
    smallest = -(-max(work, tiles + queries) // 1024) * 1024
    table = form.table_bytes
    stages = _stages(Room(unit, table, smallest, 0, 1))
    if stages < _MIN_STAGES:
        return None
    wider = -(-max(smallest, 2 * tiles + queries) // 1024) * 1024
    slots = 2 if _stages(Room(unit, table, wider, 0, 2)) == stages else 1
    return Room(unit, table, smallest if slots == 1 else wider, stages, slots)


def _long_room(
    layer: Layer, limits: StepLimits, tokens: int, tactic: Tactic, work: int
) -> Room | None:
    """Where tiles come through the ring (attend_long.cuh); None where it has no room for them."""
    form, num_sms, heads = layer.weights, limits.num_sms, layer.num_kv_heads
    unit = form.interval * form.block_bytes
    itemsize: int = getattr(torch, limits.kv_dtype).itemsize
    tile = 2 * KEYS * layer.head_size * itemsize
    if form.is_coded or tactic.pace.held or 2 * tile > unit or _TEAMS * num_sms % heads:
        return None
    if min(limits.tokens_per_block, KEYS) * layer.head_size * itemsize % (8 * ROW):
        return None
    slices = num_sms // heads
    pairs = tokens * layer.group * layer.head_size // 2
    if not slices or -(-pairs // slices) > _MOST_SLICED:
        return None
    room = -(-max(work, _MERGED_BYTES) // 1024) * 1024
    stages = _stages(Room(unit, form.table_bytes, room, 0, 1))
    return Room(unit, form.table_bytes, room, stages, 1) if stages >= _LONG_STAGES else None


def _stages(room: Room) -> int:
    fitting = (HOPPER.max_shared_bytes - room.num_bytes) // (room.unit + 40)
    return min(fitting, _MAX_RING_BYTES // room.unit)

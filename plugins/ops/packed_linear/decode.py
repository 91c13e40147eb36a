"""The packed products for few tokens: binaries and launches of `decode.cu`.

A variant has a compact notation, used in tactics: "n8r1c2s6k1g128f2" is a tile of 8 tokens, 1 row
tile and 2 chunks (blocks along K) per slot, 6 slots, no split of K, 128 thread blocks (0: chosen by
shape), 2 slots requested at once in the first pass over the ring (0: all). k0: every block has an
equal share of all intervals. With "+norm8" every block normalizes the tokens itself, with 8 warps.
With "+pair" two thread blocks, of two token tiles, copy their weights together. With "+ahead36" the
first 36 blocks load weights of later ones to L2 until their tokens come.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import (
    Constant,
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
)
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.packed_linear.arguments import (
    Argument,
    argument_kinds,
    argument_values,
    form_of,
    token_map,
    type_constants,
    type_words,
)
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.schemes.scheme import Form
from llmctl.plugins.schemes.table import FORMS, form_macros

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

TOKEN_TILES = (8, 16, 24, 32, 48, 64)
SHARED_HALF = 112 * 1024  # two thread blocks fit a multiprocessor (1 KiB each is reserved)
MAX_BLOCKS, MAX_HANDED = 264, 64  # blocks and tokens of partial sums that blocks pass on
_PART_BYTES = 512  # 16 rows x 8 tokens of float32
NORM_PART, MAX_NORM_PARTS = 256, 32  # elements that a warp normalizes at once; of a row
_NORM_SUMS = 2 * 4 * MAX_NORM_PARTS  # bytes; two rows alternately
_ALIGNMENT = 1024  # of tokens in a slot
_SLOT_BARRIERS = 24  # bytes: a slot is full, is empty, has the weights of its first pass
_AHEAD_BYTES = 128 + 8 + 2 * 8192  # of the place for what is loaded ahead, and its barrier
_WARPS = 5
_PATTERN = re.compile(
    r"n(\d+)r(\d+)c(\d+)s(\d+)k(\d+)g(\d+)f(\d+)(?:\+norm(\d+))?(\+pair)?(?:\+ahead(\d+))?"
)


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """One way to run decode.cu."""

    tokens: int  # of a tile
    row_tiles: int  # of 64 weight rows, that share a token tile in shared memory
    chunks: int  # of 128 bytes of K, a slot
    stages: int  # slots
    split: int = 1  # thread blocks of a cluster that share K; 0: equal shares of everything
    blocks: int = 0  # thread blocks; 0: see `grid_blocks`
    fill: int = 0  # slots requested at once in the first pass over the ring; 0: all
    norm_warps: int = 0  # warps that normalize the tokens; 0: they are already normalized
    pairs: bool = field(default=False, kw_only=True)  # whether two blocks share weights
    ahead: int = field(default=0, kw_only=True)  # blocks that may load weights for later ones to L2
    form: Form = field(default=FORMS[FP8], kw_only=True)  # of the weight; not part of the text

    def __str__(self) -> str:
        return (
            f"n{self.tokens}r{self.row_tiles}c{self.chunks}s{self.stages}"
            f"k{self.split}g{self.blocks}f{self.fill}"
            + f"+norm{self.norm_warps}" * self.normalizes
            + "+pair" * self.pairs
            + f"+ahead{self.ahead}" * (self.ahead > 0)
        )

    @classmethod
    def parse(cls, text: str, form: Form = FORMS[FP8]) -> DecodeVariant:
        """The inverse of str(), for weights of a form."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a decode variant")
        *numbers, pair, ahead = match.groups()
        values = [int(number or 0) for number in numbers]
        return cls(*values, pairs=bool(pair), ahead=int(ahead or 0), form=form)

    @property
    def helpers(self) -> int:
        """Warps in addition to those that copy weights and multiply."""
        return max(self.norm_warps - 4, 0) if self.normalizes else int(self.fill > 0)

    @property
    def normalizes(self) -> bool:
        """Whether blocks normalize the tokens themselves."""
        return self.norm_warps > 0

    @property
    def sharers(self) -> int:
        """Thread blocks that share weights."""
        return 2 if self.pairs else 1

    def kept_bytes(self, chunks: int) -> int:
        """Shared memory besides the ring: parts of the rows that a block owns, and normalized
        tokens."""
        tokens = chunks * self.tokens * 128 + _NORM_SUMS if self.normalizes else 0
        if self.split <= 1:
            return tokens
        intervals = -(-chunks // self.form.interval)
        return (
            tokens + intervals * self.row_tiles * (4 // self.split) * self.tokens // 8 * _PART_BYTES
        )

    @property
    def stage_bytes(self) -> int:
        """Weights and tokens of one slot."""
        tokens = 0 if self.normalizes else self.chunks * self.form.token_chunks * self.tokens * 128
        weights = self.row_tiles * self.chunks * self.form.block_bytes
        return -(-weights // _ALIGNMENT) * _ALIGNMENT + tokens

    def shared_bytes(self, chunks: int) -> int:
        """Dynamic shared memory: alignment, table, ring, what is kept beside it, barriers."""
        barriers = _SLOT_BARRIERS * self.stages + 16 + _AHEAD_BYTES * (self.ahead > 0)
        return (
            self._head_bytes + self.stages * self.stage_bytes + self.kept_bytes(chunks) + barriers
        )

    @property
    def _head_bytes(self) -> int:
        return _ALIGNMENT + self.form.table_bytes

    def fits(self, row_tiles: int, chunks: int, is_fp8: bool) -> bool:
        """Whether it can run a weight of this many row tiles and chunks."""
        intervals = -(-chunks // self.form.interval)
        return (
            chunks % self.chunks == 0
            and self.form.interval % self.chunks == 0
            and self.tokens in TOKEN_TILES
            and (self.split <= 1 or (is_fp8 and self.split in (2, 4) and intervals >= self.split))
            and (self.split != 0 or self.row_tiles == 1)
            and self.shared_bytes(chunks) <= HOPPER.max_shared_bytes
            and self.fill <= self.stages
            and (not self.normalizes or self._normalizes_width(chunks * (128 if is_fp8 else 64)))
            and not (self.normalizes and self.form.is_coded)
            and not (self.pairs and (self.split != 1 or self.fill or self.normalizes))
            and (not self.ahead or self._loads_ahead(row_tiles))
        )

    def _normalizes_width(self, hidden: int) -> bool:
        parts = hidden // NORM_PART
        is_whole = hidden % NORM_PART == 0 and parts % self.norm_warps == 0
        has_room = parts <= MAX_NORM_PARTS and 4 <= self.norm_warps <= 16
        return is_whole and has_room and self.tokens == 8 and self.fill == 0

    def _loads_ahead(self, row_tiles: int) -> bool:
        is_plain = self.split == 1 and not (self.normalizes or self.form.is_coded)
        is_a_tile_each = self.row_tiles == 1 and self.blocks in (0, row_tiles)
        return is_plain and is_a_tile_each and self.ahead < row_tiles and self.fill > 0

    def with_stages(self, chunks: int, room: int) -> DecodeVariant:
        """The same with as many slots as fit `room` bytes."""
        room -= self._head_bytes + 16 + self.kept_bytes(chunks)
        return replace(self, stages=room // (self.stage_bytes + _SLOT_BARRIERS))


def grid_blocks(variant: DecodeVariant, row_tiles: int, num_sms: int) -> int:
    """Thread blocks along x: with equal shares of the row tiles, as far as they divide."""
    if variant.split > 1:  # a cluster takes one group of row tiles
        return -(-row_tiles // variant.row_tiles) * variant.split
    if variant.blocks or variant.split == 0:  # none without work: each waits for the previous one
        return min(variant.blocks or num_sms, row_tiles)
    if row_tiles <= 2 * num_sms:  # two to a multiprocessor
        return -(-row_tiles // variant.row_tiles)
    each = -(-row_tiles // num_sms)
    return -(-row_tiles // each)


def decode_spec(call: OpCall, variant: DecodeVariant, limits: StepLimits) -> KernelSpec:
    """The binary of one call and variant; calls of equal dtypes and features share it."""
    assert variant.form.block_bytes == form_of(call).block_bytes
    chunks = call.inputs["weight"].shape[1]
    intervals = -(-chunks // variant.form.interval) if variant.split > 1 else 0
    handed = ("*fp32", "*i32") if variant.split == 0 else ()
    constants: dict[str, Constant] = {
        **type_constants(call, limits),
        **form_macros(form_of(call)),
        "TOKENS": variant.tokens,
        "ROW_TILES": variant.row_tiles,
        "CHUNKS": variant.chunks,
        "STAGES": variant.stages,
        "SPLIT": variant.split,
        "MAX_INTERVALS": intervals,
        "FILL": variant.fill,
        "SHARERS": variant.sharers,
    }
    if variant.ahead:
        constants["AHEAD"] = variant.ahead
    shape = f"n{variant.tokens}r{variant.row_tiles}c{variant.chunks}s{variant.stages}"
    words = [call.op, "few", shape]
    words += [f"k{variant.split}i{intervals}"] * (variant.split > 1)
    words += ["even"] * (variant.split == 0)
    words += [f"f{variant.fill}"] * (variant.fill > 0)
    words += ["pair"] * variant.pairs
    words += [f"ahead{variant.ahead}"] * (variant.ahead > 0)
    if variant.normalizes:
        hidden = call.inputs["x"].shape[1]
        constants |= {"NORM": 1, "HIDDEN": hidden, "NORM_WARPS": variant.norm_warps}
        words.append(f"norm{hidden}w{variant.norm_warps}")
    words += type_words(call, limits)
    return KernelSpec(
        name=".".join(words),
        source="ops/packed_linear/decode.cu",
        arguments=(*token_kinds(call, variant), *argument_kinds(call, limits), *handed),
        constants=constants,
        entry="decode",
        num_warps=_WARPS + variant.helpers,
        shared_bytes=variant.shared_bytes(chunks),
        cluster=max(variant.split, 1) * variant.sharers,
    )


def token_kinds(call: OpCall, variant: DecodeVariant) -> tuple[str, ...]:
    """Types of the arguments that say where tokens come from."""
    if not variant.normalizes:
        return ("tensor_map",)
    kind = pointer(call.inputs["x"].dtype)
    return (kind, kind, kind if "residual_out" in call.outputs else "i64", kind, "fp32")


def token_values(call: OpCall, variant: DecodeVariant, tokens: int) -> tuple[Argument, ...]:
    """Those arguments for the first `tokens` rows."""
    if not variant.normalizes:
        return (token_map(call, min(tokens, variant.tokens)),)
    assert tokens <= variant.tokens
    residuals = (call.inputs["residual"], call.outputs.get("residual_out", 0))
    epsilon = float(call.attributes["epsilon"])
    return (call.inputs["x"], *residuals, call.inputs["norm_weight"], epsilon)


def decode_launch(call: OpCall, env: LaunchEnv, tokens: int, variant: DecodeVariant) -> Launch:
    """Multiply the first `tokens` rows of `x`."""
    row_tiles = call.inputs["weight"].shape[0]
    sharers = variant.sharers
    blocks = grid_blocks(variant, row_tiles, env.limits.num_sms) * sharers
    grid = (blocks, -(-tokens // (variant.tokens * sharers)), 1)
    arguments = (*token_values(call, variant, tokens), *argument_values(call, env, tokens))
    if variant.split == 0:
        assert grid[0] <= MAX_BLOCKS and grid[1] == 1 and variant.tokens <= MAX_HANDED
        sums = env.scratch(
            "packed_linear.sums", (MAX_BLOCKS, TILE_ROWS * MAX_HANDED), torch.float32
        )
        ready = env.scratch("packed_linear.ready", (MAX_BLOCKS,), torch.int32)
        arguments = (*arguments, sums, ready)
    return Launch(decode_spec(call, variant, env.limits), grid, arguments)

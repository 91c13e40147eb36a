"""Which variant a packed product uses for how many tokens.

A tactic is text that the builder stores with the operator: entries "up to this many tokens:variant"
in ascending order, "*" for any number, as in "8:n8r1c1s12k1g0f0;16:n16r2c1s6k1g0f0;*:many". Entries
come from `tactics.json`, measured on a device by scripts/bench/gemm.py, and for sizes that are not
in it from a rule. All variants give the same bits, so a tactic decides time alone. Variants that
normalize are for products with a norm, which the builder makes where the table has such a variant.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.packed_linear.arguments import form_of, leaves_of
from llmctl.plugins.ops.packed_linear.decode import SHARED_HALF, DecodeVariant
from llmctl.plugins.ops.packed_linear.forms import MANY as MANY
from llmctl.plugins.schemes.table import FORMS

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

FEW_TOKENS = (8, 16, 32, 64)  # upper ends of the entries for few tokens
_FEWEST_STAGES = 3  # the fewest that keep enough reads in flight
_SMALL_WEIGHT = 24 << 20  # bytes, read in a few microseconds
MOST_SHARED = 2  # row tiles that share a token tile, of those chosen by rule
RING_ROOM = 206 * 1024  # leaves room for small kernels on the multiprocessor of a waiting product


def parse_tactic(tactic: str) -> list[tuple[int, str]]:
    """(most tokens, variant) in ascending order; the last entry holds any number."""
    entries = []
    for entry in tactic.split(";"):
        limit, _, variant = entry.partition(":")
        entries.append((1 << 31 if limit == "*" else int(limit), variant))
    return entries


def tactic_of(call: OpCall) -> str:
    """The call's own tactic, or the best known for its sizes."""
    if call.tactic:
        return call.tactic
    tiles, chunks = call.inputs["weight"].shape[:2]
    has_norm, in_leaves = "norm_weight" in call.inputs, leaves_of(call) > 1
    form = form_of(call).name
    return choose_tactic(call.op, tiles, chunks, form, has_norm=has_norm, in_leaves=in_leaves)


def choose_tactic(
    op: str,
    row_tiles: int,
    chunks: int,
    form_name: str,
    *,
    has_norm: bool = False,
    in_leaves: bool = False,
) -> str:
    """The tactic of a weight of [row_tiles, chunks] blocks of a form, by its name. in_leaves: rows
    of several parts of K, which share no tokens; such products were not measured."""
    measured = {} if in_leaves else _measured(op, row_tiles, chunks, form_name)
    most = 1 if in_leaves else MOST_SHARED
    chosen = {n: str(default_variant(n, row_tiles, chunks, form_name, most)) for n in FEW_TOKENS}
    chosen |= {n: v for n, v in measured.items() if has_norm or not normalizes(v)}
    return ";".join([*(f"{n}:{chosen[n]}" for n in sorted(chosen)), f"*:{MANY}"])


def normalizes(variant: str) -> bool:
    """Whether a variant of a tactic takes the norm into the product."""
    return variant != MANY and DecodeVariant.parse(variant).normalizes


def can_normalize(op: str, row_tiles: int, chunks: int, form_name: str) -> bool:
    """Whether the norm in the product is measured to be faster for some number of tokens."""
    return any(map(normalizes, _measured(op, row_tiles, chunks, form_name).values()))


def default_variant(
    tokens: int, row_tiles: int, chunks: int, form_name: str, most_shared: int = MOST_SHARED
) -> DecodeVariant:
    """The rule for sizes that were not measured. most_shared: row tiles that may share tokens.

    Small weights with few rows: K split in clusters, two blocks per multiprocessor, so that the
    next product can fill its ring. Otherwise one block with a large ring per multiprocessor: whole
    row tiles if these divide nearly evenly over the multiprocessors, else equal shares.
    """
    form = FORMS[form_name]
    is_fp8 = form.numbers == FP8
    intervals = -(-chunks // form.interval)
    splits = [k for k in (4, 2) if is_fp8 and row_tiles * k <= HOPPER.num_sms and intervals >= k]
    if row_tiles * chunks * form.block_bytes <= _SMALL_WEIGHT:
        for split in splits:
            variant = DecodeVariant(tokens, 1, 1, 0, split, form=form)
            variant = _filled(variant, chunks, SHARED_HALF)
            if variant.stages >= _FEWEST_STAGES:
                return variant
    each = -(-row_tiles // HOPPER.num_sms)
    is_even = each == 1 or row_tiles >= 0.95 * each * HOPPER.num_sms
    share = most_shared if is_even and each > 1 and tokens <= 16 else 1
    ways = [2, 1] if 2 in splits else [1] if is_even else [0]
    for split, wide in itertools.product(ways, (4, 2, 1)):
        if form.interval % wide:
            continue
        variant = DecodeVariant(tokens, share, wide, 0, split, form=form)
        variant = _filled(variant, chunks, RING_ROOM)
        if chunks % wide == 0 and variant.stages >= min(_FEWEST_STAGES, chunks):
            break
    return variant


def _filled(variant: DecodeVariant, chunks: int, room: int) -> DecodeVariant:
    """With as many slots as fit, but no more than one run over K needs if K is split."""
    filled = variant.with_stages(chunks, room)
    if variant.split < 2:
        return filled
    interval = variant.form.interval
    intervals = -(-chunks // interval)
    needed = -(-intervals // variant.split) * interval // variant.chunks
    return replace(filled, stages=min(filled.stages, max(needed, _FEWEST_STAGES)))


def _measured(op: str, row_tiles: int, chunks: int, form_name: str) -> dict[int, str]:
    entries = _table().get(f"{op} {row_tiles}x{chunks} {form_name}", {})
    return {int(tokens): variant for tokens, variant in entries.items()}


@cache
def _table() -> dict[str, dict[str, str]]:
    path = files("llmctl.plugins.ops.packed_linear") / "tactics.json"
    table: dict[str, dict[str, str]] = json.loads(path.read_text())["variants"]
    return table

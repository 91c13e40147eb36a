"""Which variant a packed product uses for how many tokens.

A tactic is text that the builder stores with the operator: entries "up to this many tokens:variant"
in ascending order, "*" for any number, as in "8:n8r1c1s12k1g0l0;16:n16r2c1s6k1g0l0;*:many". Entries
come from `tactics.json`, measured on a device by scripts/bench_gemm.py, and for sizes that are not
in it from a rule. All variants give the same bits, so a tactic decides time alone.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from llmctl.plugins.packed_linear.arguments import name_of
from llmctl.plugins.packed_linear.decode import INTERVAL, SHARED_HALF, DecodeVariant

if TYPE_CHECKING:
    from llmctl.plugins.program import OpCall

MANY = "many"  # the kernel for many tokens, which chooses its tile by itself
FEW_TOKENS = (8, 16, 32, 64)  # upper ends of the entries for few tokens
_NUM_SMS = 132
RING_ROOM = 206 * 1024  # leaves room for small kernels beside a waiting product


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
    return choose_tactic(call.op, tiles, chunks, name_of(call.inputs["x"]))


def choose_tactic(op: str, row_tiles: int, chunks: int, dtype: str) -> str:
    """The tactic of a weight of [row_tiles, chunks] blocks with elements of `dtype`."""
    measured = _table().get(f"{op} {row_tiles}x{chunks} {dtype}", {})
    is_fp8 = dtype == "float8_e4m3fn"
    entries = []
    for tokens in FEW_TOKENS:
        variant = measured.get(str(tokens))
        if variant is None:
            variant = str(default_variant(tokens, row_tiles, chunks, is_fp8))
        entries.append(f"{tokens}:{variant}")
    return ";".join([*entries, f"*:{MANY}"])


def default_variant(tokens: int, row_tiles: int, chunks: int, is_fp8: bool) -> DecodeVariant:
    """The rule for sizes that nobody measured.

    Few rows: K split in clusters, two blocks to a multiprocessor. Otherwise one block with a large
    ring on each: with whole tiles where they divide nearly evenly, else with equal shares.
    """
    intervals = -(-chunks // INTERVAL)
    split = 1
    while is_fp8 and split < 4 and row_tiles * split * 2 <= _NUM_SMS and intervals >= split * 2:
        split *= 2
    if split > 1 or row_tiles * 2 <= _NUM_SMS:
        return DecodeVariant(tokens, 1, 1, 0, split).with_stages(intervals, SHARED_HALF)
    each = -(-row_tiles // _NUM_SMS)
    is_even = row_tiles >= 0.95 * each * _NUM_SMS
    share = 2 if is_even and each > 1 and tokens <= 16 else 1
    variant = DecodeVariant(tokens, share, 1, 0, 1 if is_even else 0)
    return variant.with_stages(intervals, RING_ROOM)


@cache
def _table() -> dict[str, dict[str, str]]:
    path = files("llmctl.plugins.packed_linear") / "tactics.json"
    table: dict[str, dict[str, str]] = json.loads(path.read_text())["variants"]
    return table

"""When one launch replaces many, and how it loads its weights: from tactics.json, measured by
scripts/bench/layers.py, or as stored in an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from llmctl.errors import CorruptEngine
from llmctl.plugins.fused.decoder_layers.chain import Layer

NAME = "decoder_layers"  # of binaries, and of their scratch memory
# tokens: in longer contexts an attention work item takes a team of warps too long
MAX_CONTEXT = 4096
Gains = tuple[tuple[int, bool], ...]  # (contexts up to, whether one launch is faster), ascending


class Pace(NamedTuple):
    """How fast weights are loaded to a block: the limits are chunks (8 KiB) in flight, enough to
    keep the memory busy and no more, because results exchanged between blocks queue behind them.
    From one layer's down projection to the next layer's gate, when blocks mostly exchange results,
    the limit may be lower; if the ring has no room for all weights, some are held in registers."""

    small: int  # for qkv and output projections
    ahead: int  # for gate and up, as far as the ring has room before they begin
    other: int  # for the rest of gate and up, and for down
    early: int  # the wait for a layer ends when all but so many blocks have finished
    held: int  # ring units (32 KiB of FP8) of gate and up held in registers


@dataclass(frozen=True, slots=True)
class Tactic:
    """What was measured for a shape."""

    gains: Gains
    pace: Pace

    def gains_at(self, context: int) -> bool:
        """Whether one launch is faster in steps padded to so many tokens of context."""
        return next((gain for most, gain in self.gains if context <= most), False)

    def words(self) -> list[str]:
        """The end of a binary's name: context lengths up to which one launch is faster ("+") or not
        ("-")."""
        gains = "".join(f"{most}{'-+'[gain]}" for most, gain in self.gains)
        return ["p" + "_".join(map(str, self.pace)), gains]


USUAL = Pace(4, 4, 6, 8, 0)  # for shapes that were not measured
NOWHERE, EVERYWHERE = Tactic((), USUAL), Tactic(((MAX_CONTEXT, True),), USUAL)


def shape_key(layer: Layer, tokens: int = 1) -> str:
    """The layer's sizes and a step's tokens, in the notation of tactics.json."""
    heads = f"a{layer.num_heads}.{layer.num_kv_heads}x{layer.head_size}"
    key = f"h{layer.hidden}.i{layer.intermediate}.{heads}"
    return key + f".{layer.weights.name}" * layer.weights.is_coded + f".n{tokens}" * (tokens > 1)


def measured_tactic(layer: Layer, tokens: int) -> Tactic:
    """From tactics.json; a shape that is not in it never uses one launch."""
    key, table = shape_key(layer, tokens), _table()
    times = sorted((int(most), each) for most, each in table["ms"].get(key, {}).items())
    gains = tuple((most, each["one_launch"] < each["launches"]) for most, each in times)
    return Tactic(gains, Pace(*table["pace"].get(key, USUAL)))


def stored_tactics(kernels: Iterable[str]) -> dict[int, Tactic]:
    """The tactics in the names of an engine's binaries, by tokens; CorruptEngine if a name is that
    of another version of llmctl."""
    stored: dict[int, Tactic] = {}
    for name in kernels:
        if not name.startswith(f"{NAME}."):
            continue
        found = re.search(r"\.n(\d+)\..*\.p(\d+)_(\d+)_(\d+)_(\d+)_(\d+)\.([\d+-]+)$", name)
        if found is None:
            raise CorruptEngine(
                f"another version of llmctl built the kernel {name!r}", fix="build the engine again"
            )
        tokens, *pace = map(int, found.groups()[:6])
        gains = re.findall(r"(\d+)([+-])", found[7])
        stored[tokens] = Tactic(
            tuple((int(most), sign == "+") for most, sign in gains), Pace(*pace)
        )
    return stored


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        (files("llmctl.plugins.fused.decoder_layers") / "tactics.json").read_text()
    )
    return table

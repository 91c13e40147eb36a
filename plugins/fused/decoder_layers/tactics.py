"""When one launch takes the place of many, and how it gets its weights: as tactics.json has it,
which scripts/bench/layers.py measured, or an engine that was built by it.
"""

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

NAME = "decoder_layers"  # of binaries, and of what they ask of scratch
MAX_CONTEXT = 4096  # tokens: in longer ones a unit of attention takes a team too long
Gains = tuple[tuple[int, bool], ...]  # (contexts up to, whether one launch is faster), ascending


class Pace(NamedTuple):
    """How weights come to a block. Of its chunks (8 KiB) so many may be on their way: enough for
    the memory to be busy, and no more, for what blocks hand on queues behind them. Weights that
    come while blocks mostly hand on, from one layer's down projection to the next one's gate, may
    come more slowly; where the ring has no room for all of them, registers have some.
    """

    small: int  # of qkv and output projections
    ahead: int  # of gate and up, as much as fits into the ring before they begin
    other: int  # of gate and up, and of down
    early: int  # blocks whose part of a layer may be missing when the next one asks for it
    held: int  # units (32 KiB of FP8) of gate and up that wait in registers


@dataclass(frozen=True, slots=True)
class Tactic:
    """What was measured of a shape."""

    gains: Gains
    pace: Pace

    def gains_at(self, context: int) -> bool:
        """Whether one launch is faster in steps that are padded to so many tokens of context."""
        return next((gain for most, gain in self.gains if context <= most), False)

    def words(self) -> list[str]:
        """As a binary's name ends: contexts up to which one launch is faster ("+") or not ("-")."""
        gains = "".join(f"{most}{'-+'[gain]}" for most, gain in self.gains)
        return ["p" + "_".join(map(str, self.pace)), gains]


USUAL = Pace(4, 4, 6, 8, 0)  # of shapes that were not measured
NOWHERE, EVERYWHERE = Tactic((), USUAL), Tactic(((MAX_CONTEXT, True),), USUAL)


def shape_key(layer: Layer, tokens: int = 1) -> str:
    """The layer's sizes and a step's tokens, as tactics.json has them."""
    heads = f"a{layer.num_heads}.{layer.num_kv_heads}x{layer.head_size}"
    key = f"h{layer.hidden}.i{layer.intermediate}.{heads}"
    return key + ".mxfp4" * layer.is_mxfp4 + f".n{tokens}" * (tokens > 1)


def measured_tactic(layer: Layer, tokens: int) -> Tactic:
    """Of tactics.json: one launch nowhere where it does not have the shape."""
    key, table = shape_key(layer, tokens), _table()
    times = sorted((int(most), each) for most, each in table["ms"].get(key, {}).items())
    gains = tuple((most, each["one_launch"] < each["launches"]) for most, each in times)
    return Tactic(gains, Pace(*table["pace"].get(key, USUAL)))


def stored_tactics(kernels: Iterable[str]) -> dict[int, Tactic]:
    """What the names of an engine's binaries say of them, by tokens; CorruptEngine where one is
    named as another version of this program did."""
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

"""When one launch replaces many, and how it loads its weights: from tactics.json, measured by
scripts/bench/layers.py, or as stored in an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from llmctl.errors import CorruptEngine
from llmctl.plugins.fused.decoder_layers.chain import Layer

NAME = "decoder_layers"  # of binaries, and of their scratch memory
# Tokens. In contexts longer than SHORT keys and values come through the ring of weights, by
# binaries of their own (attend_long.cuh).
SHORT, MAX_CONTEXT = 4096, 131072
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
    """What was measured for a shape, of one binary."""

    gains: Gains  # false also where another binary is faster
    pace: Pace

    def gains_at(self, context: int) -> bool:
        """Whether one launch is faster in steps padded to so many tokens of context."""
        return next((gain for most, gain in self.gains if context <= most), False)

    @property
    def reach(self) -> int:
        """The longest context that the binary may see: attention has code for no longer ones."""
        return min(MAX_CONTEXT, max((most for most, _ in self.gains), default=SHORT))

    @property
    def is_long(self) -> bool:
        """Whether the binary is one for contexts longer than SHORT."""
        return self.reach > SHORT

    def gains_within(self, most: int) -> bool:
        """Whether one launch is faster in some steps of an engine whose contexts have at most so
        many tokens."""
        starts = (0, *(context for context, _ in self.gains))
        return any(gain and at < most for at, (_, gain) in zip(starts, self.gains, strict=False))

    def words(self) -> list[str]:
        """The end of a binary's name: context lengths up to which one launch is faster ("+") or not
        ("-")."""
        gains = "".join(f"{most}{'-+'[gain]}" for most, gain in self.gains)
        return ["p" + "_".join(map(str, self.pace)), gains]


USUAL = Pace(4, 4, 6, 8, 0)  # for shapes that were not measured
NOWHERE, EVERYWHERE = Tactic((), USUAL), Tactic(((SHORT, True),), USUAL)


def shape_key(layer: Layer, tokens: int = 1) -> str:
    """The layer's sizes and a step's tokens, in the notation of tactics.json."""
    heads = f"a{layer.num_heads}.{layer.num_kv_heads}x{layer.head_size}"
    key = f"h{layer.hidden}.i{layer.intermediate}.{heads}"
    return key + f".{layer.weights.name}" * layer.weights.is_coded + f".n{tokens}" * (tokens > 1)


def measured_tactics(layer: Layer, tokens: int, is_always: bool = False) -> tuple[Tactic, ...]:
    """From tactics.json, one for each binary; a shape that is not in it never uses one launch.
    is_always: with the same binaries, but in all steps that they compute, faster or not."""
    key, table = shape_key(layer, tokens), _table()
    times = sorted((int(most), each) for most, each in table["ms"].get(key, {}).items())
    gains = tuple(
        (most, is_always or each["one_launch"] < each["launches"]) for most, each in times
    )
    pace = Pace(*table["pace"].get(key, USUAL))
    if is_always and not gains:
        gains = EVERYWHERE.gains
    long_pace = Pace(*table["pace"].get(f"{key}.long", pace._replace(held=0)))
    return divided(gains, pace, table["own_binary"].get(key, ()), long_pace)


def divided(
    gains: Gains, pace: Pace, own: Sequence[int], long_pace: Pace | None = None
) -> tuple[Tactic, ...]:
    """First the binary for all contexts up to SHORT but those up to each of `own` that are longer
    than the next shorter ones in `gains`: these have one each, which is compiled for contexts up to
    there. Last the one for longer contexts, if there are gains."""
    short = tuple((most, gain) for most, gain in gains if most <= SHORT)
    others = tuple((most, gain and most not in own) for most, gain in short)
    apart = [
        tuple((most, gain and most == last) for most, gain in short if most <= last) for last in own
    ]
    found = [Tactic(each, pace) for each in (others, *apart)]
    if any(gain for most, gain in gains if most > SHORT):
        beyond = tuple((most, gain and most > SHORT) for most, gain in gains)
        found.append(Tactic(beyond, long_pace or pace._replace(held=0)))
    return tuple(found)


def stored_tactic(name: str) -> tuple[int, Tactic] | None:
    """The tokens and the tactic in the name of an engine's binary, None if it is not one of these;
    CorruptEngine if the name is that of another version of llmctl."""
    if not name.startswith(f"{NAME}."):
        return None
    found = re.search(r"\.n(\d+)\..*\.p(\d+)_(\d+)_(\d+)_(\d+)_(\d+)\.([\d+-]+)$", name)
    if found is None:
        raise CorruptEngine(
            f"another version of llmctl built the kernel {name!r}", fix="build the engine again"
        )
    tokens, *pace = map(int, found.groups()[:6])
    gains = re.findall(r"(\d+)([+-])", found[7])
    return tokens, Tactic(tuple((int(most), sign == "+") for most, sign in gains), Pace(*pace))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        (files("llmctl.plugins.fused.decoder_layers") / "tactics.json").read_text()
    )
    return table

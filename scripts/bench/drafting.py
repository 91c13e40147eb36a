"""What drafts in a row of scripts/bench/cuda.py: which engines, what a round reads and promises.

The name of a row says it: 70b+1b-k13 is a target with a draft engine and 13 drafts per round,
70b-room24+1b-t12x2x23x1 one with room for 24 drafts and the draft engine's tree 12,2,23,1,
70b-medusa an engine with Medusa heads, 70b-redrafter one with a recurrent head (-head4: of 4-bit
weights), 70b-eagle one with an EAGLE-3 head, 70b-eagle-tree one that drafts its likeliest tree
(-d6: of paths of up to 6 drafts), 8b-lookahead one that guesses ahead in its own steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmctl.builder.engine_format import (
    BASE,
    EAGLE_CACHE,
    EAGLE_EXTEND,
    EAGLE_NEXT,
    MEDUSA_GRAPH,
    REDRAFTER_FIRST,
    REDRAFTER_NEXT,
    EngineConfig,
)
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree, parse_tree
from llmctl.runtime.drafting.eagle.method import MOST_OFFERS, Eagle
from llmctl.runtime.drafting.growth.growth import LEVELS
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.drafting.medusa.engine_check import built_tree
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.engine_check import beam_shape
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.engine import Engine, block_bytes
from llmctl.runtime.engines.planted_text import tokens_per_round
from llmctl.runtime.open import OpenEngines
from scripts.bench.rows import weight_bytes

DRAFT_LEN = 10
PUBLISHED = {"1b": 191.74, "3b": 151.53, "8b": 134.38}  # TensorRT-LLM 0.15, one H200, tok/s


class Drafting(Protocol):
    """One way to draft."""

    @property
    def row(self) -> str:
        """The name of its measurements."""

    @property
    def target(self) -> str:
        """The target's name."""

    @property
    def steps(self) -> int:
        """Runs of what drafts, in a round."""

    @property
    def published(self) -> float | None:
        """Its published tok/s."""

    def method(self, engines: Path) -> DraftMethod:
        """With the engines of a folder."""

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        """What one of its runs must read."""

    def expected_length(self, opened: OpenEngines) -> float | None:
        """Tokens a round at the acceptance that the weights were planted with; None: not known."""


@dataclass(frozen=True)
class EnginePair:
    """A draft engine beside the target."""

    target: str
    draft: str
    row = "pair"

    @property
    def steps(self) -> int:
        return int(self.draft.partition("-k")[2] or DRAFT_LEN)

    @property
    def published(self) -> float | None:
        return PUBLISHED[self.draft.partition("-")[0]]

    def method(self, engines: Path) -> DraftMethod:
        folder = f"{self.draft.partition('-k')[0]}-draft"
        return DraftEngine(engines / folder, self.steps)

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        (draft,) = opened.opened.draft_engines
        return read_bytes(draft, context)

    def expected_length(self, opened: OpenEngines) -> float:
        return chain_length(opened.checked.configs["draft"], self.steps)


@dataclass(frozen=True)
class EngineTree:
    """A draft engine that drafts a tree: one with room for its levels, or where drafts are followed
    one by one the one that drafts chains."""

    target: str
    draft: str
    tree: str
    row = "pair"
    published = None

    @property
    def asked(self) -> DraftTree:
        return parse_tree(self.tree.replace("x", ","))

    @property
    def steps(self) -> int:
        return self.asked.depth

    def method(self, engines: Path) -> DraftMethod:
        kind = "draft" if self.asked.width == 1 else "room24-draft"
        return DraftEngine(engines / f"{self.draft}-{kind}", tree=self.asked)

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        (draft,) = opened.opened.draft_engines
        return read_bytes(draft, context)

    def expected_length(self, opened: OpenEngines) -> float | None:
        return None


@dataclass(frozen=True)
class MedusaHeads:
    """Heads in the target's engine, and the tree that it was built with."""

    target: str
    row = "heads"
    steps = 1
    published = None

    def method(self, engines: Path) -> DraftMethod:
        return Medusa()

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        return weight_bytes(opened.target.plan, MEDUSA_GRAPH)

    def expected_length(self, opened: OpenEngines) -> float:
        target = opened.checked.target
        return tokens_per_round(target.weights, built_tree(target).paths)


@dataclass(frozen=True)
class RecurrentHead:
    """A ReDrafter head in the target's engine, and the beams that it was built with."""

    target: str
    row = "heads"
    steps = 1
    published = None

    def method(self, engines: Path) -> DraftMethod:
        return RecurrentDrafting()

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        plan = opened.target.plan
        steps = beam_shape(opened.checked.target, None, None).length
        first, later = (weight_bytes(plan, name) for name in (REDRAFTER_FIRST, REDRAFTER_NEXT))
        return first + (steps - 1) * later

    def expected_length(self, opened: OpenEngines) -> float | None:
        return None


@dataclass(frozen=True)
class EagleHead:
    """An EAGLE-3 head in the target's engine, and the chain that it was built for: a step that
    reads what was committed, and one behind each draft but the last."""

    target: str
    row = "heads"
    published = None

    @property
    def steps(self) -> int:
        return 5

    def method(self, engines: Path) -> DraftMethod:
        return Eagle(self.steps)

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        plan = opened.target.plan
        cache = context * block_bytes(plan, EAGLE_CACHE) // opened.target.tokens_per_block
        extend, later = (weight_bytes(plan, name) + cache for name in (EAGLE_EXTEND, EAGLE_NEXT))
        return (extend + (self.steps - 1) * later) // self.steps

    def expected_length(self, opened: OpenEngines) -> float | None:
        return chain_length(opened.checked.target, self.steps)


@dataclass(frozen=True)
class EagleTree(EagleHead):
    """The likeliest tree of as many drafts as the engine was built for, level by level."""

    depth: str | None = None  # in digits; None: EAGLE's

    @property
    def steps(self) -> int:
        return int(self.depth or LEVELS)

    def method(self, engines: Path) -> DraftMethod:
        return Eagle(num_offers=MOST_OFFERS, depth=self.steps)

    def expected_length(self, opened: OpenEngines) -> float | None:
        return None


@dataclass(frozen=True)
class Lookahead:
    """The window and the guesses that an engine was built for. Planted texts have no repetition to
    guess from: of these rows the time of a round counts."""

    target: str
    row = "heads"
    steps = 1
    published = None

    def method(self, engines: Path) -> DraftMethod:
        return LookaheadDecoding()

    def step_bytes(self, opened: OpenEngines, context: int) -> int:
        """None but windows and pools."""
        return 0

    def expected_length(self, opened: OpenEngines) -> float | None:
        return None


DRAFTINGS: dict[str, Callable[..., Drafting]] = {
    r"([^+]+)\+([^+]+)-t([0-9x]+)": EngineTree,
    r"([^+]+)\+([^+]+)": EnginePair,
    r"([^+]+-medusa)": MedusaHeads,
    r"([^+]+-redrafter(?:-head4)?)": RecurrentHead,
    r"([^+]+-eagle)": EagleHead,
    r"([^+]+-eagle-tree)(?:-d(\d+))?": EagleTree,
    r"([^+]+-lookahead)": Lookahead,
}


def find_drafting(name: str) -> Drafting | None:
    """What a row's name says; None: a target alone."""
    for form, make in DRAFTINGS.items():
        found = re.fullmatch(form, name)
        if found is not None:
            return make(*found.groups())
    return None


def chain_length(planted: EngineConfig, steps: int) -> float:
    """Tokens a round of so many drafts, each right with probability p: (1-p^(k+1))/(1-p)."""
    p = float(planted.weights["acceptance"])
    return (1 - p ** (steps + 1)) / (1 - p)


def read_bytes(engine: Engine, context: int) -> int:
    """Bytes that a step must read: weights but the embedding's, and the context's KV."""
    kv_bytes = context * engine.kv_bytes_per_block // engine.tokens_per_block
    return weight_bytes(engine.plan, BASE) + kv_bytes

"""A drafter of random trees, some path of which goes where the target will go."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from llmctl.builder.engine_format import EngineConfig
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.drafting.target_check import check_target
from llmctl.runtime.request import Batch
from llmctl.runtime.request import Sequence as Generated
from support.e2e import Outputs

Answer = Callable[[Generated], Sequence[int]]  # all tokens that the target will generate


class TreeDrafter(NoDrafter):
    """Proposes as many drafts as it may: a prefix of the answer at random places of a random tree,
    now and then none of it; a request in eight gets a chain, one in eight nothing."""

    def __init__(self, max_draft_len: int, answer: Answer, vocab: int, seed: int = 0) -> None:
        self.max_draft_len = max_draft_len
        self.num_trees = 0
        self._answer = answer
        self._vocab = vocab
        self._draw = random.Random(seed)

    def propose(self, batch: Batch) -> list[Drafts]:
        """Drafts of every generation slice."""
        proposed = []
        for item in batch.generation:
            sequence = item.sequence
            new = len(sequence.tokens) - sequence.num_prompt_tokens
            right = list(self._answer(sequence)[new : new + item.draft_len])
            kind = self._draw.random()
            if kind < 1 / 8:
                right = []
            made = random_tree(self._draw, right, item.draft_len, self._vocab)
            if 1 / 8 <= kind < 1 / 4:
                made = Drafts(right)
            self.num_trees += made.parents is not None
            proposed.append(made)
        return proposed


@dataclass(frozen=True)
class RandomTrees:
    """The method: as many drafts as the engine takes, around `answers` of requests in order."""

    draft_len: int | None
    answers: Outputs
    name = "random trees"
    build_mode = EXTERNAL_DRAFTS
    is_drafting = True
    has_lengths = True
    drafts_trees = True
    is_device_led = False
    notes = ()
    acceptance = "tokens"
    engines: ClassVar[Mapping[str, Path]] = MappingProxyType({})

    def with_draft_len(self, draft_len: int) -> RandomTrees:
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        return check_target(target, self.draft_len)

    def make_drafter(self, engines: object, draft_len: int) -> TreeDrafter:
        return drafter_of(self.answers, draft_len)

    def make_device_drafter(self, engines: object, draft_len: int, drafter: object) -> None:
        return None


def drafter_of(answers: Outputs, draft_len: int) -> TreeDrafter:
    """For requests that are enqueued in the order of their answers, over and over."""

    def answer(sequence: Generated) -> Sequence[int]:
        return answers[(sequence.request_id - 1) % len(answers)][0]

    return TreeDrafter(draft_len, answer, vocab=64)


def random_tree(draw: random.Random, right: Sequence[int], size: int, vocab: int) -> Drafts:
    """`size` drafts, among them a path of the first few tokens of `right`."""
    depth = draw.randint(min(len(right), 1), min(len(right), size))
    places = set(draw.sample(range(size), depth))
    tokens: list[int] = []
    parents: list[int] = []
    taken: dict[int, set[int]] = {}
    last, num_right = ROOT, 0
    for index in range(size):
        if index in places:
            parent, token = last, right[num_right]
            last, num_right = index, num_right + 1
        else:
            parent = draw.randrange(ROOT, index)
            free = set(range(min(vocab, 64))) - taken.get(parent, set()) - set(right)
            token = draw.choice(sorted(free))
        taken.setdefault(parent, set()).add(token)
        parents.append(parent)
        tokens.append(token)
    return Drafts(tokens, parents)

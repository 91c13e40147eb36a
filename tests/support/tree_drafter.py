"""A drafter of random trees, some path of which goes where the target will go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.request import Batch
from llmctl.runtime.request import Sequence as Generated

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

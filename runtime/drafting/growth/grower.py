"""Lets drafts grow, all sequences together: a step a level, and what its rows offer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.ops.sampling.spec import (
    DRAFT_STREAM,
    TARGET_STREAM,
    Logits,
    SamplingRow,
)
from llmctl.runtime.drafting.growth.growth import Chain, Growth, Plant
from llmctl.runtime.generate.sampler import Sampler, bad_logits
from llmctl.runtime.request import Sequence
from llmctl.runtime.step import block_tables


class Levels(Protocol):
    """What computes drafts. most_sequences, most_rows: of one of its steps."""

    most_sequences: int
    most_rows: int

    def next(self, rows: list[int], growths: Items[Growth], tables: NDArray[np.int32]) -> None:
        """Compute all frontiers, in order: a row for each node, behind `rows` of the step before.
        tables [len(growths), blocks]: the block tables."""

    def logits(self, rows: list[int]) -> Logits:
        """[len(rows), vocab] of rows of the last step; only ids that the target has."""


class Grower:
    """Makes chains, or the trees of `plant` for requests that take the likeliest tokens. Chains are
    drawn as the target will draw at the same positions, with the same noise: trees of likely tokens
    would know nothing of it. With `keep_probs` they have a random stream of their own, and sampled
    ones keep what they were drawn from."""

    def __init__(
        self,
        levels: Levels,
        sampler: Sampler,
        plant: Plant | None = None,
        *,
        keep_probs: bool = False,
    ) -> None:
        self._levels, self._sampler, self._plant = levels, sampler, plant
        self._keep_probs = keep_probs

    def start(self, sequence: Sequence, row: int, room: int) -> Growth:
        """For at most `room` drafts; row: of the step that reads the root."""
        is_plain, plant = self._sampler.is_plain(sequence), self._plant
        if plant is not None:
            if is_plain:
                return plant.tree(sequence, row, room)
            room = min(room, plant.depth)
        return Chain(sequence, row, room, is_plain=is_plain)

    def grow(self, active: Items[Growth]) -> None:
        """Steps until all have their drafts; they know what their roots offer."""
        active = [own for own in active if own.frontier]
        tables = block_tables([own.sequence for own in active])
        while active:
            for part in self._parts(active):
                self._step(active[part], tables[part])
            still = [index for index, own in enumerate(active) if own.frontier]
            if len(still) < len(active):
                active = [active[index] for index in still]
                tables = tables[still]

    def offer(self, growths: Items[Growth], rows: Items[list[int]]) -> None:
        """Give each what its rows of the last step offer."""
        chains = [own for own in growths if isinstance(own, Chain)]
        if len(chains) == len(growths):
            self._draw(chains, [row for (row,) in rows])
            return
        pairs = list(zip(growths, rows, strict=True))
        if chains:
            self._draw(chains, [at[0] for own, at in pairs if isinstance(own, Chain)])
        trees = [(own, at) for own, at in pairs if not isinstance(own, Chain)]
        if trees:
            logits = self._levels.logits([row for _, at in trees for row in at])
            count = min(max(own.num_offers for own, _ in trees), logits.shape[1])
            ids, scores = self._sampler.backend.top_log_probs(logits, count)
            is_bad = np.isnan(scores[:, 0])
            first = 0
            for own, at in trees:
                part = np.s_[first : first + len(at), : own.num_offers]
                its_ids, its_scores = ids[part], scores[part]
                if is_bad[part[0]].any():  # it has failed: any tree will do
                    own.sequence.fail(bad_logits("draft", (-is_bad[part[0]].astype(int)).tolist()))
                    its_ids = np.broadcast_to(np.arange(its_ids.shape[1]), its_ids.shape)
                    its_scores = np.zeros_like(its_scores)
                own.take(its_ids.tolist(), its_scores.tolist())
                first += len(at)

    def _step(self, growths: Items[Growth], tables: NDArray[np.int32]) -> None:
        before = [
            own.row if node.parent is None else node.parent.row
            for own in growths
            for node in own.frontier
        ]
        self._levels.next(before, growths, tables)
        rows = iter(range(len(before)))
        for node in chain.from_iterable(own.frontier for own in growths):
            node.row = next(rows)
        self.offer(growths, [[node.row for node in own.frontier] for own in growths])

    def _parts(self, active: Items[Growth]) -> Iterator[slice]:
        """As many sequences together as a step may have."""
        levels = self._levels
        first = num_rows = 0
        for index, own in enumerate(active):
            count = len(own.frontier)
            is_full = index - first == levels.most_sequences
            if is_full or num_rows + count > levels.most_rows:
                yield slice(first, index)
                first, num_rows = index, 0
            num_rows += count
        yield slice(first, len(active))

    def _draw(self, chains: list[Chain], at: list[int]) -> None:
        """Append a token to each chain, from its row of logits."""
        sampler, logits = self._sampler, self._levels.logits(at)
        if all(own.is_plain for own in chains):
            tokens = sampler.backend.argmax(logits).tolist()
        else:
            stream = DRAFT_STREAM if self._keep_probs else TARGET_STREAM
            rows = [sampler.row(own.sequence, own.tokens, stream) for own in chains]
            tokens = sampler.backend.sample_rows(logits, rows).tolist()
            if self._keep_probs:
                self._store_probs(logits, rows, chains)
        for own, token in zip(chains, tokens, strict=True):
            if token < 0:  # it has failed: any chain will do
                own.sequence.fail(bad_logits("draft", [token]))
            own.append(max(token, 0))

    def _store_probs(self, logits: Logits, rows: list[SamplingRow], chains: list[Chain]) -> None:
        """Keep the distributions that sampled drafts were drawn from, over the target's ids."""
        sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        if not sampled:
            return
        chosen = logits if len(sampled) == len(rows) else logits[sampled]
        probs = self._sampler.backend.processed_probs(chosen, [rows[index] for index in sampled])
        missing = self._sampler.vocab_size - probs.shape[1]  # ids that a draft engine lacks
        if missing:
            probs = np.pad(probs, ((0, 0), (0, missing)))
        for index, row_probs in zip(sampled, probs, strict=True):
            chains[index].probs.append(row_probs)

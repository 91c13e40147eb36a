"""A recurrent head beside a fake engine: what it offers follows from the tokens that led to it."""

from __future__ import annotations

import numpy as np
import torch

from llmctl.plugins.backends.cpu.beam_search import AskedBeams, FoundTree
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.runtime.drafting.redrafter.beams import Bounds
from llmctl.runtime.drafting.redrafter.search import Asked, StepSearch
from support.fake_heads import HeadedEngine
from support.mixing import fold, share


class FakeRecurrentHead:
    """Knows what greedy decoding says of a path; for a share of the contexts, something else."""

    def __init__(self, engine: HeadedEngine, agreement: float = 1.0) -> None:
        self.engine, self.agreement = engine, agreement
        self.contexts: list[list[int]] = []
        self.rows_of_runs: list[int] = []

    def first(self, rows, tokens, count):
        assert len(rows) <= self.engine.max_batch_size
        self.rows_of_runs = []
        known = [self.engine.row_tokens[row].tolist() for row in rows]
        self.contexts = [[*own, token] for own, token in zip(known, tokens.tolist(), strict=True)]
        for own, token in zip(known, tokens.tolist(), strict=True):
            assert len(own) > 0 and 0 <= token < self.engine.vocab_size
        return self._offers(count)

    def next(self, rows, tokens, count):
        before = [self.contexts[row] for row in rows.tolist()]
        self.contexts = [[*own, token] for own, token in zip(before, tokens.tolist(), strict=True)]
        return self._offers(count)

    def _offers(self, count):
        self.rows_of_runs.append(len(self.contexts))
        logits = []
        for context in self.contexts:
            tokens = np.array(context)
            own = self.engine.logits(tokens)
            if share(fold(tokens) ^ 1, 1)[0] >= self.agreement:
                own = np.roll(own, 1)
            logits.append(own)
        ids, log_probs = top_log_probs(torch.tensor(np.array(logits), dtype=torch.float32), count)
        return ids.numpy(), log_probs.numpy()


class FakeCompiledSearch:
    """A search in one call, some of which begin ahead: what they find is of the moment of `begin`.
    What a begun one keeps is the engine's, so that nothing may run before its end."""

    def __init__(self, head: FakeRecurrentHead) -> None:
        self._search, self._engine = StepSearch(head), head.engine
        self._begun: list[FoundTree] | None = None
        self._runs = 0
        self.num_begun = self.num_run = 0

    @property
    def num_steps(self) -> int:
        return self._search.num_steps

    def run(self, asked: AskedBeams) -> list[FoundTree]:
        assert self._begun is None
        self.num_run += 1
        return self._trees(asked)

    def begin(self, asked: AskedBeams) -> bool:
        assert self._begun is None
        if asked.roots[0] % 5 == 0:  # no thread has time
            return False
        self.num_begun += 1
        self._begun, self._runs = self._trees(asked), self._engine.num_runs
        return True

    def end(self) -> list[FoundTree]:
        assert self._begun is not None and self._runs == self._engine.num_runs
        found, self._begun = self._begun, None
        return found

    def _trees(self, asked: AskedBeams) -> list[FoundTree]:
        requests = [Asked(*own) for own in zip(*asked[:4], strict=True)]
        found = self._search.search(requests, asked.num_beams, Bounds(*asked[5:]))
        chain = [list(range(-1, len(own.drafts.tokens) - 1)) for own in found]
        return [
            FoundTree(own.drafts.tokens, own.drafts.parents or parents, list(own.scores))
            for own, parents in zip(found, chain, strict=True)
        ]

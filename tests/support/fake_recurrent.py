"""A recurrent head beside a fake engine: what it offers follows from the tokens that led to it."""

from __future__ import annotations

import numpy as np
import torch

from llmctl.plugins.ops.beam_search.reference import top_log_probs
from support.fake_engine import fold, share
from support.fake_heads import HeadedEngine


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

"""Heads beside a fake engine: what they say of a row follows from the tokens that led to it."""

from __future__ import annotations

import numpy as np

from support.fake_engine import FakeEngine
from support.mixing import fold, share


class HeadedEngine(FakeEngine):
    """Also keeps which tokens each row of its last step was computed from."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.row_tokens: list[np.ndarray] = []
        self._is_running = False

    def run(self, step):
        self.row_tokens, self._is_running = [], True
        rows = super().run(step)
        self._is_running = False
        return rows

    def logits(self, tokens):
        if self._is_running:
            self.row_tokens.append(np.asarray(tokens, np.int64))
        return super().logits(tokens)


class FakeHeads:
    """Head m knows what greedy decoding says m + 1 tokens after the next one: it gives that the
    rank `right_rank`, or, for a share of the contexts, no rank."""

    def __init__(
        self, engine: HeadedEngine, num_heads: int, right_rank: int = 0, agreement: float = 1.0
    ) -> None:
        self.engine, self.num_heads = engine, num_heads
        self.right_rank, self.agreement = right_rank, agreement
        self.num_runs = 0

    def top_tokens(self, rows, count):
        self.num_runs += 1
        assert rows.dtype == np.int32 and len(rows) <= self.engine.max_batch_size
        made = np.empty((len(rows), self.num_heads, count), np.int64)
        for index, row in enumerate(rows):
            tokens = self.engine.row_tokens[row].tolist()
            tokens.append(int(self.engine.logits(np.array(tokens)).argmax()))
            for head in range(self.num_heads):
                logits = self.engine.logits(np.array(tokens))
                tokens.append(int(logits.argmax()))
                others = np.argsort(-logits, kind="stable")[1:].tolist()
                is_right = share(fold(np.array(tokens)) ^ head, 1)[0] < self.agreement
                if is_right and self.right_rank < count:
                    others.insert(self.right_rank, tokens[-1])
                made[index, head] = others[:count]
        return made

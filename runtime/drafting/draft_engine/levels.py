"""A draft engine's steps behind its first: the drafts of one level."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.drafting.growth.growth import Growth
from llmctl.runtime.drafting.growth.levels import pack_level
from llmctl.runtime.step import StepRunner


class EngineLevels:
    """See Levels. vocab_size: the target's, of which the engine may lack some, or have more."""

    def __init__(self, engine: StepRunner, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self.most_sequences = engine.max_batch_size
        rows = engine.max_batch_size * (1 + engine.max_draft_len)
        self.most_rows = min(engine.max_num_tokens, rows)
        self._logits: Logits = np.zeros((0, engine.vocab_size), np.float32)  # of the last step

    def run(self, step: StepInputs) -> None:
        """Run any step; its rows are those of the last step then."""
        if self._engine.vocab_size < self._vocab_size:
            # Padding of the target's vocabulary: any id of the draft engine can be used instead.
            np.minimum(step.token_ids, self._engine.vocab_size - 1, out=step.token_ids)
        self._logits = self._engine.run(step)

    def next(self, rows: list[int], growths: Items[Growth], tables: NDArray[np.int32]) -> None:
        """A row for each node: what comes before is in the engine's cache."""
        roots = np.array([len(own.sequence.tokens) - 1 for own in growths], np.int32)
        self.run(pack_level(growths, roots, tables, self._engine.tokens_per_block))

    def logits(self, rows: list[int]) -> Logits:
        """Without ids that the target lacks, wherever the rows are."""
        found = self._logits if rows == list(range(len(self._logits))) else self._logits[rows]
        if found.shape[1] <= self._vocab_size:
            return found
        if isinstance(found, np.ndarray):
            return np.ascontiguousarray(found[:, : self._vocab_size])
        return found.columns(self._vocab_size)

"""The recurrent head of an engine, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT
from llmctl.runtime.drafting.redrafter.beams import Offers
from llmctl.runtime.step import pack_continued

if TYPE_CHECKING:
    from llmctl.runtime.engines.engine import Engine


class EngineHead:
    """The head of an engine that has one. See Head."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = ("", 0)  # the graph of the last step, and its rows

    def first(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """The first step of a round."""
        return self._run(REDRAFTER_FIRST, rows, tokens, count)

    def next(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Every other step."""
        return self._run(REDRAFTER_NEXT, rows, tokens, count)

    def _run(
        self, graph: str, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int
    ) -> Offers:
        if graph == REDRAFTER_NEXT:
            source, left = self._last
            self._engine.hand_on(source, graph, left)
        outputs = self._engine.run_head(graph, pack_continued(tokens, rows))
        self._last = (graph, len(tokens))
        return self._engine.top_log_probs(outputs["logits"], count)

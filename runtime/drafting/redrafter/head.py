"""The recurrent head of an engine, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES
from llmctl.runtime.drafting.redrafter.beams import Offers
from llmctl.runtime.step import pack_continued

if TYPE_CHECKING:
    import torch

    from llmctl.runtime.engines.engine import Engine


class EngineHead:
    """The head of an engine that has one. See Head."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._states: Mapping[str, torch.Tensor] = {}  # of the last step's rows, in the engine

    def first(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """The first step of a round."""
        return self._run(REDRAFTER_FIRST, rows, tokens, count)

    def next(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Every other step."""
        return self._run(REDRAFTER_NEXT, rows, tokens, count)

    def _run(
        self, graph: str, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int
    ) -> Offers:
        states = self._states if graph == REDRAFTER_NEXT else {}
        outputs = self._engine.run_head(graph, pack_continued(tokens, rows), states)
        self._states = {name: outputs[name] for name in REDRAFTER_STATES}
        return self._engine.top_log_probs(outputs["logits"], count)

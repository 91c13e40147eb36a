"""The heads of an engine: which tokens they find likeliest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import MEDUSA_GRAPH, medusa_logits
from llmctl.runtime.step import pack_rows

if TYPE_CHECKING:
    from llmctl.runtime.engines.engine import Engine


class EngineHeads:
    """The first heads of an engine that has them. See Heads."""

    def __init__(self, engine: Engine, num_heads: int) -> None:
        self._engine = engine
        self._names = [medusa_logits(head) for head in range(num_heads)]

    def top_tokens(self, rows: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """Run the heads for these rows of the last step."""
        step = pack_rows(self._engine.max_num_rows, rows.tolist())
        outputs = self._engine.run_head(MEDUSA_GRAPH, step)
        found = self._engine.top_ids([outputs[name] for name in self._names], count)
        return found.transpose(1, 0, 2)

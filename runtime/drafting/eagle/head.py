"""The EAGLE head of an engine: runs its steps, each behind rows of the one before."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import (
    EAGLE_CACHE,
    EAGLE_EXTEND,
    EAGLE_NEXT,
    EAGLE_STATE,
    eagle_inputs,
)
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.drafting.eagle.pairs import Pairs, pack_pairs, roots
from llmctl.runtime.drafting.growth.growth import Growth
from llmctl.runtime.drafting.growth.levels import pack_level
from llmctl.runtime.kv_cache import BlockHolder

if TYPE_CHECKING:
    import torch

    from llmctl.runtime.engines.engine import Engine


class EngineHead:
    """The head of an engine that has one. See Head."""

    def __init__(self, engine: Engine) -> None:
        facts = engine.config.build_config["draft_heads"]
        self._engine = engine
        self._reads = eagle_inputs(facts["taps"], are_apart=facts["fc_norm"])
        self.most_sequences = engine.max_batch_size
        self.most_rows = engine.max_batch_size * int(facts["num_beams"])
        self._outputs: Mapping[str, torch.Tensor] = {}  # of the last step's rows, in the engine
        self._at: NDArray[np.int32] = np.zeros(
            0, np.int32
        )  # which of them are those that were asked for

    @property
    def holders(self) -> Mapping[str, BlockHolder]:
        """The cache of its layer."""
        return {EAGLE_CACHE: self._engine.head_caches[EAGLE_CACHE]}

    def features(self) -> dict[str, list[torch.Tensor]]:
        """What each of its inputs reads of the target: rows that a step of that leaves, side by
        side."""
        return {
            name: [self._engine.output(tap) for tap in taps] for name, taps in self._reads.items()
        }

    def go_on(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """The last step was enqueued elsewhere, and leaves these."""
        self._outputs = outputs
        count = len(outputs[EAGLE_STATE])
        self._at = np.arange(count, dtype=np.int32)

    def extend(self, pairs: Items[Pairs]) -> None:
        """Read pairs that are committed."""
        engine = self._engine
        rows = np.concatenate([own.rows for own in pairs])
        for name, outputs in self.features().items():
            engine.give_rows(EAGLE_EXTEND, name, outputs, rows)
        step = pack_pairs(pairs, engine.tokens_per_block)
        self._outputs = engine.run_head(EAGLE_EXTEND, step)
        self._at = np.arange(step.num_rows, dtype=np.int32)

    def next(self, rows: list[int], growths: Items[Growth], tables: NDArray[np.int32]) -> None:
        """Behind rows of the step before."""
        engine = self._engine
        step = pack_level(growths, roots(growths), tables, engine.tokens_per_block)
        sources = self._at[rows].astype(np.int64)
        engine.give_rows(EAGLE_NEXT, EAGLE_STATE, [self._outputs[EAGLE_STATE]], sources)
        self._at = step.logit_rows
        self._outputs = engine.run_head(EAGLE_NEXT, step)

    def logits(self, rows: list[int]) -> Logits:
        """Of some rows of the last step."""
        logits = self._engine.as_logits(self._outputs["logits"])
        at = self._at[rows].tolist()
        return logits if at == list(range(len(logits))) else logits[at]

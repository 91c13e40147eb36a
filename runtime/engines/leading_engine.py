"""An engine that several ranks run together, as rank 0 has it: every call is also the others'.

Nothing above an engine knows: the same calls are made, and logits are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.engines.led_calls import LedCalls
from llmctl.runtime.kv_cache import Arrival, BlockCopy, BlockHolder, Move
from llmctl.runtime.ranks.leader import Leader


class LeadingEngine(Engine):
    """See Engine for every method. Sizes are those of all ranks together.

    Any method raises RankFailure once a rank is lost, and from then on.
    """

    def __init__(self, engine: Engine, leader: Leader, role: str) -> None:
        super().__init__(engine.config, engine.plan)
        self._engine, self._leader = engine, leader
        self._calls = LedCalls(leader, role, engine.plan)
        self.weight_bytes = engine.weight_bytes * leader.options.size
        self.onboards_aside = engine.onboards_aside
        self.is_asynchronous = engine.is_asynchronous
        self.takes_trees = engine.takes_trees

    @property
    def kv_bytes_per_block(self) -> int:
        """On one machine all ranks' caches are in the same memory."""
        return self._engine.kv_bytes_per_block * self._leader.options.size

    @property
    def head_caches(self) -> Mapping[str, BlockHolder]:
        """Those of rank 0, which drafts with its heads while the others wait."""
        return self._engine.head_caches

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """On every rank."""
        self._calls.allocate("allocate_kv_cache", num_blocks, self._engine.allocate_kv_cache)

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """On every rank."""
        self._calls.allocate("allocate_host_blocks", num_blocks, self._engine.allocate_host_blocks)

    def copy_block(self, source: int, destination: int) -> None:
        """On every rank."""
        self.copy_blocks([BlockCopy(source, destination, self.tokens_per_block)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """On every rank."""
        return self._calls.lead("copy_blocks", copies, self._engine.copy_blocks)

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """On every rank."""
        self._calls.lead("compact", moves, self._engine.compact)

    def run(self, step: StepInputs) -> Logits:
        """On every rank; the logits or best ids are here."""
        return self._calls.lead("run", step, self._engine.run)

    def output(self, name: str) -> torch.Tensor:
        """Equal on all ranks, or whole on this one."""
        return self._engine.output(name)

    def run_head(self, name: str, step: StepInputs) -> dict[str, torch.Tensor]:
        """On every rank that has a part of it; a head that is whole runs here alone."""
        return self._calls.lead_head(name, "run_head", (name, step), self._engine.run_head)

    def hand_on(self, source: str, head: str, count: int) -> None:
        """On every rank, what is its own."""
        self._calls.lead_head(head, "hand_on", (source, head, count), self._engine.hand_on)

    def give_rows(
        self, head: str, name: str, sources: Sequence[torch.Tensor], rows: NDArray[np.int64]
    ) -> None:
        """Here alone."""
        self._engine.give_rows(head, name, sources, rows)

    def as_logits(self, output: torch.Tensor) -> Logits:
        """As of one rank."""
        return self._engine.as_logits(output)

    def top_ids(self, logits: Sequence[torch.Tensor], count: int) -> NDArray[np.int64]:
        """As of one rank."""
        return self._engine.top_ids(logits, count)

    def top_log_probs(
        self, logits: torch.Tensor, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As of one rank."""
        return self._engine.top_log_probs(logits, count)

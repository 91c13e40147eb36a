"""An engine on rank 0's GPU that all ranks run, each on its own: every call is also theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.led_calls import LedCalls
from llmctl.runtime.kv_cache import Arrival, BlockCopy, Move
from llmctl.runtime.ranks.leader import Leader


class LeadingCudaEngine(CudaEngine):
    """See CudaEngine for every method. What rounds enqueue is handed on by LeadingRounds.

    Any method raises RankFailure once a rank is lost, and from then on.
    """

    def __init__(self, leader: Leader, role: str, *parts: Any, **more: Any) -> None:
        """parts, more: of CudaEngine."""
        super().__init__(*parts, **more)
        self._calls = LedCalls(leader, role, self.plan)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """On every rank."""
        self._calls.allocate("allocate_kv_cache", num_blocks, super().allocate_kv_cache)

    def copy_block(self, source: int, destination: int) -> None:
        """On every rank."""
        self.copy_blocks([BlockCopy(source, destination, self.tokens_per_block)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """On every rank."""
        return self._calls.lead("copy_blocks", copies, super().copy_blocks)

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """On every rank."""
        self._calls.lead("compact", moves, super().compact)

    def run(self, step: StepInputs) -> Logits:
        """On every rank; the logits or best ids are here."""
        return self._calls.lead("run", step, super().run)

    def run_head(self, name: str, step: StepInputs) -> dict[str, torch.Tensor]:
        """On every rank that has a part of it; a head that is whole runs here alone."""
        return self._calls.lead_head(name, "run_head", (name, step), super().run_head)

    def hand_on(self, source: str, head: str, count: int) -> None:
        """On every rank, what is its own."""
        self._calls.lead_head(head, "hand_on", (source, head, count), super().hand_on)

    def feed(self, step: StepInputs) -> None:
        """On every rank."""
        self._calls.lead("feed", step, super().feed)

    def prepare_prompts(self, max_num_tokens: int) -> None:
        """On every rank."""
        self._calls.lead("prepare_prompts", max_num_tokens, super().prepare_prompts)

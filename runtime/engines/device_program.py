"""What runs an engine's operators on a device, as an engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, Launch, StepLimits, StepShape
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.ops.rank_offers.kernel import SharedLogits
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch


class DeviceProgram(Protocol):
    """Runs an engine's operators on a device; `backends.cuda.program.CudaProgram` is one."""

    step: DeviceStep
    limits: StepLimits

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, with a device each."""

    def upload(self, step: StepInputs, stream: int) -> None:
        """Enqueue the copy of a step's integers to `self.step`; the arrays may change at once."""

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Use this cache from now on."""

    def enqueue(self, shape: StepShape, stream: int) -> None:
        """Launch every call in order."""

    def prepare(self, shape: StepShape) -> None:
        """Do in advance what the first launch of such a step would have to do."""

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        """Launch kernels besides the program's own."""

    def best_ids(self, out: torch.Tensor, rows: int, *, stride: int = 1, offset: int = 0) -> Launch:
        """The best id of each row of a step that wanted no more; see `CudaProgram`."""

    def keeps_best(self, rows: int) -> bool:
        """Whether on one rank a step of so many rows finds best ids without logits, if it wants no
        more."""

    def best_draws(
        self, out: torch.Tensor, scratch: SamplingScratch, rows: DrawnRows
    ) -> list[Launch]:
        """The same for draws without filters, where the program `has_peers`."""

    def offers(
        self,
        logits: SharedLogits,
        keys: torch.Tensor,
        sums: torch.Tensor | None,
        rows: int,
        count: int,
    ) -> Launch:
        """The likeliest ids of logits of heads, where the program `has_peers`; see
        `rank_offers.launch`."""

    def beside(
        self, calls: Sequence[OpCall], row_inputs: Sequence[torch.Tensor], kv_dtype: str = ""
    ) -> DeviceProgram:
        """A program of other calls, with this one's kernels and a step of its own. kv_dtype: of its
        KV cache, if it is not this one's."""

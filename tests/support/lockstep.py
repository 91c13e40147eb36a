"""All ranks of an engine in lockstep on a CPU: each operator by whatever program runs one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmctl.builder.engine_format import Plan, read_engine_config
from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.backends.cuda.kernel_spec import Parts, StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall, StepInputs, row_extents
from llmctl.plugins.fused.all_reduce_norm.reference import reduce_and_normalize
from llmctl.plugins.ops.all_gather.reference import gather_ranks
from llmctl.plugins.ops.all_reduce.reference import reduce_ranks
from llmctl.plugins.ops.rank_argmax.reference import argmax_ranks
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.lockstep import lockstep_parts, lockstep_plan, name_on, rank_stride
from llmctl.runtime.engines.rotary_tables import open_with_tables
from support.cuda import FakeCapture, FakeProgram

OF_RANKS = ("all_reduce", "all_reduce_norm", "all_gather")


class InLockstep:
    """The calls of a plan of all ranks; `make` makes the program of a call that is one rank's."""

    def __init__(
        self,
        calls: Sequence[OpCall],
        parts: Parts,
        make: Callable[..., Any],
        row_inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        self.parts_of = parts
        self._calls = [
            (call, extent, None if call.op in OF_RANKS else _one(call, extent, make))
            for call, extent in zip(calls, row_extents(calls, row_inputs=row_inputs), strict=True)
        ]

    def run(self, step: StepInputs, kv_cache: torch.Tensor) -> None:
        alone = replace(step, best_only=False)  # of operators that know nothing of ranks
        own = alone
        if any(call.op == "recurrence" for call, _, _ in self._calls):  # which alone continues rows
            own = replace(alone, logit_rows=np.arange(step.num_rows, dtype=np.int32))
        for call, extent, program in self._calls:
            if program is not None:
                program.run(alone if call.op == "recurrence" else own, kv_cache)
                continue
            rows = step.num_tokens if extent == "tokens" else step.num_rows
            parts = self.parts_of(call.inputs["x"], int(call.attributes["ranks"]))
            given = [part[:rows] for part in parts]
            if call.op == "all_reduce":
                reduce_ranks(given, call.inputs, call.outputs)
            elif call.op == "all_reduce_norm":
                epsilon = float(call.attributes["epsilon"])
                reduce_and_normalize(given, call.inputs, call.outputs, epsilon)
            elif step.best_only and "to_all" not in call.attributes:
                out = call.outputs["out"]
                self._best = argmax_ranks(given, out.shape[1])
                gather_ranks(given, {"out": out})
                self._shared = out.clone()
                out.fill_(torch.nan)  # nobody reads it
            else:
                gather_ranks(given, call.outputs)

    def best_ids(self, rows: int) -> torch.Tensor:
        """Of the last step."""
        return self._best[:rows]

    def shared_logits(self, rows: int) -> torch.Tensor:
        """The same: what ranks have shares of."""
        return self._shared[:rows]


def _one(call: OpCall, extent: str, make: Callable[..., Any]) -> Any:
    rows = [call.inputs["x"]] if extent == "rows" and call.op != "gather_rows" else []
    return make([call], rows)


def open_in_lockstep(
    engine_dir: Path,
    queue: DeviceQueue,
    *,
    has_peers: bool = False,
    make: Callable[..., Any] = CpuProgram,
    edit: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[CudaEngine, FakeCapture]:
    """A cpu engine of several ranks as one of the CUDA backend, all ranks on one device. has_peers:
    for whoever asks, each has a device. make: as in InLockstep; edit: what a rank's plan is
    replaced by."""
    capture, config = FakeCapture(), read_engine_config(engine_dir)
    opened = [open_with_tables(engine_dir, rank) for rank in range(config.num_ranks)]
    plans: list[Plan] = [edit(plan) for plan, _ in opened]
    weights = {
        name_on(rank, name): tensor
        for rank, (_, tensors) in enumerate(opened)
        for name, tensor in tensors.items()
    }

    def make_program(calls: list[OpCall], limits: StepLimits) -> FakeProgram:
        parts = lockstep_parts(rank_stride(plans[0]))

        def made(calls: Sequence[OpCall], row_inputs: Sequence[torch.Tensor] = ()) -> InLockstep:
            return InLockstep(calls, parts, make, row_inputs)

        return FakeProgram(calls, limits, has_peers=has_peers, make=made)

    return CudaEngine(config, lockstep_plan(plans), weights, make_program, queue, capture), capture

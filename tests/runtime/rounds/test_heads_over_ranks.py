"""What rounds with heads launch on a rank with a GPU of its own: kernels that its engine has, with
the arguments that these take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import planted
from support.cuda_program import Recorder

from llmctl.builder.engine_format import PlanGraph
from llmctl.builder.engine_kernels import kernel_specs
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import Peers, StepLimits, TensorMap
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.device_loop.state import RoundState
from llmctl.runtime.drafting.device_rows import DeviceRows
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.drafting.medusa.engine_check import built_tree
from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter
from llmctl.runtime.drafting.redrafter.engine_check import beam_shape
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing

MODES: dict[str, dict[str, Any]] = {
    "medusa": {"num_medusa_heads": 3},
    "redrafter": {"redrafter_num_beams": 2, "redrafter_draft_len_per_beam": 3},
}


class Checking(Recorder):
    """Asks of every launch what a driver asks."""

    def load(self, kernel: CompiledKernel) -> Any:
        super().load(kernel)
        return kernel

    def prepare(self, loaded: Any, grid: Any, arguments: Any, use_pdl: bool) -> Any:
        assert len(arguments) == len(loaded.arguments), loaded.name
        for kind, value in zip(loaded.arguments, arguments, strict=True):
            if kind == "tensor_map":
                assert isinstance(value, TensorMap), loaded.name
            elif kind.startswith("*") and isinstance(value, torch.Tensor):
                assert kind == pointer(value.dtype) and value.data_ptr() % 16 == 0, loaded.name
            else:
                assert not kind.startswith("*") and isinstance(value, int | float), loaded.name
        return super().prepare(loaded.name, grid, arguments, use_pdl)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        pass

    def make_event(self) -> Any:
        return SimpleNamespace(wait=lambda: None, record=lambda stream: None)


def opened(folder: Path, mode: str) -> tuple[CudaEngine, Checking]:
    """Rank 1 of two, on a device that computes nothing."""
    limits = {"max_batch_size": 2, "speculative_decoding_mode": mode, **MODES[mode]}
    engine = planted.plan(folder, "fp8", tp_size=2, **limits)
    weights = {
        tensor.name: torch.zeros(tuple(map(int, tensor.shape)), dtype=getattr(torch, tensor.dtype))
        for tensor in engine.plan.tensors
        if tensor.kind == "weight"
    }
    kinds = (torch.int64, torch.int32, torch.int32)
    words = [torch.zeros(4, dtype=kind) for kind in kinds]
    peers, driver = Peers(1, 2, *words, slot_bytes=1 << 24, limit_ns=10**9), Checking()

    def make_program(calls: list[OpCall], own: StepLimits) -> CudaProgram:
        binaries = [
            CompiledKernel(spec.name, "f", b"", 128, 0, spec.arguments, 1, 0, 16, 0)
            for spec in kernel_specs(engine.plan, own)
        ]
        return CudaProgram(calls, binaries, own, "cpu", driver, peers=peers)

    target = CudaEngine(engine.config, engine.plan, weights, make_program, DeviceQueue("cpu"))
    target.allocate_kv_cache(4)
    return target, driver


def drafter_of(target: CudaEngine, mode: str) -> DeviceRows:
    if mode == "medusa":
        tree = built_tree(target.config)
        return DeviceMedusa(target, tree, tree.num_nodes, HiddenRows())
    built = beam_shape(target.config, None, None)
    return DeviceReDrafter(target, built, built, built.num_drafts, HiddenRows())


@pytest.mark.parametrize("mode", MODES)
def test_heads_launch_what_the_engine_has_and_gather_no_logits(tmp_path: Path, mode: str) -> None:
    target, driver = opened(tmp_path / "target", mode)
    drafter, batch = drafter_of(target, mode), 2
    trees = drafter.make_trees(batch, target.max_draft_len, "cpu")
    state = RoundState.allocate(batch, target.max_draft_len, "cpu")
    drafter.bind(DeviceSteps([target], target.queue, state, trees))
    driver.launched.clear()
    drafter.enqueue_drafts(RoundShape(batch, 64, Drawing.GREEDY, drafter.draft_len))
    names = [name for name, *_ in driver.launched]
    steps = 3 if mode == "redrafter" else 1
    gathered = [name for name in names if name.startswith("all_gather")]
    assert gathered and not any(".fp32." in name for name in gathered)
    assert len(gathered) == sum(_gatherings(target.plan.heads, mode))
    assert sum(name.startswith("rank_offers.peers") for name in names) == steps
    assert not any(name.startswith(("beams.offer", "rounds.list_top")) for name in names)
    chosen = "beams.select" if mode == "redrafter" else "rounds.fill_tree"
    assert sum(name.startswith(chosen) and ".c" in name for name in names) == steps


def _gatherings(heads: dict[str, PlanGraph], mode: str) -> list[int]:
    """Of what operators read, of each run of a graph in such a round."""
    runs = {"redrafter.first": 1, "redrafter.next": 2, "medusa": 1}
    return [
        runs[name] * sum("to_all" in op.attributes for op in graph.ops)
        for name, graph in heads.items()
    ]

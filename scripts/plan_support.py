"""Plans of planted shapes, as a build makes them, without weights or binaries."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from layers_support import write_config
from planted_shapes import SHAPES

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan
from llmctl.builder.generated import LoadFormat
from llmctl.builder.kernels import step_limits
from llmctl.plugins.cuda.kernel import StepLimits
from llmctl.plugins.program import OpCall
from llmctl.runtime.engine import bind_plan, make_calls


@cache
def planned(
    name: str, kv_algo: str | None = "FP8", qformat: str | None = "fp8"
) -> tuple[Plan, StepLimits]:
    """A plan for batches of four and 4,096 tokens of context, and its limits."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder), SHAPES[name], kv_algo, qformat=qformat)
        built = plan_build(
            Path(folder),
            BuildRequest(max_batch_size=4, max_seq_len=4096),
            backend="cuda",
            compute_capability="9.0",
            load_format=LoadFormat("dummy"),
            with_binaries=False,
        )
    return built.plan, step_limits(built.plan, built.limits)


def bound(plan: Plan) -> list[OpCall]:
    """The plan's calls as an engine has them, activations views of one arena, without memory."""
    weights = {
        each.name: torch.empty(
            [int(dim) for dim in each.shape], dtype=getattr(torch, each.dtype), device="meta"
        )
        for each in plan.tensors
        if each.kind == "weight"
    }
    arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device="meta")
    return make_calls(plan, bind_plan(plan, weights, arena))

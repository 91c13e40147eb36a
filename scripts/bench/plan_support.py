"""Plans of planted shapes, as a build makes them, without weights or binaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan
from llmctl.builder.planted import LoadFormat
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.quantize.format import (
    CONFIG_FILE,
    QUANT_CONFIG_FILE,
    find_scheme,
    quantization_documents,
)
from llmctl.runtime.engines.engine import bind_plan, make_calls
from scripts.models.planted_shapes import SHAPES, Shape, config_json


def write_config(
    folder: Path,
    shape: Shape,
    kv_algo: str | None,
    *,
    qformat: str | None = "fp8",
    excluded: Sequence[str] = ("lm_head",),
) -> None:
    """The configuration files of a checkpoint, quantized (but `excluded` modules) or not."""
    config = config_json(shape)
    if qformat is None:
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        return
    nested, flat = quantization_documents(find_scheme(qformat), kv_algo, list(excluded), "planted")
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"quantization_config": flat}))
    (folder / QUANT_CONFIG_FILE).write_text(json.dumps(nested))


def plan_shape(
    shape: Shape,
    request: BuildRequest,
    kv_algo: str | None,
    qformat: str | None,
    excluded: Sequence[str] = ("lm_head",),
) -> tuple[Plan, StepLimits]:
    """The plan of a build for Hopper, and its limits."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder), shape, kv_algo, qformat=qformat, excluded=excluded)
        built = plan_build(
            Path(folder),
            request,
            backend="cuda",
            compute_capability="9.0",
            load_format=LoadFormat("dummy"),
            with_binaries=False,
        )
    return built.plan, step_limits(built.plan, built.limits.to_dict())


@cache
def planned(
    name: str, kv_algo: str | None = "FP8", qformat: str | None = "fp8", ranks: int = 1
) -> tuple[Plan, StepLimits]:
    """That of a shape by name, for batches of four and 4,096 tokens of context."""
    request = BuildRequest(max_batch_size=4, max_seq_len=4096, tp_size=ranks)
    return plan_shape(SHAPES[name], request, kv_algo, qformat)


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

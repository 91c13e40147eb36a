"""Engines whose attention has FP8 products, planned without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan
from llmctl.builder.engine_plan import EnginePlan
from support.cuda_build import SMALL, write_model

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
LIMITS = {"max_batch_size": 2, "max_num_tokens": 600, "max_seq_len": 800}


def write_llama(folder: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A small model with heads that FP8 products have kernels for, in FP8 with an FP8 cache."""
    return write_model(folder, architecture, {**SMALL, **HEADS, **fields}, "static")


def plan_engine(
    folder: Path, plugins: dict[str, str] | None, backend: str = "cuda", **fields: Any
) -> EnginePlan:
    """fields: of BuildRequest, where others than LIMITS are wanted."""
    request = BuildRequest(**{**LIMITS, **fields})
    return plan_build(folder, request, backend=backend, plugins=plugins, with_binaries=False)


def attributes_of(plan: Plan) -> list[dict[str, object]]:
    """Those of attention, layer by layer."""
    return [dict(op.attributes) for op in plan.ops if op.op == "paged_attention"]

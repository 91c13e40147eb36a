"""Engines of generated weights, planned and filled on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.runtime.engines.engine import bind_plan
from llmctl.runtime.engines.lockstep import lockstep_plan, name_on
from llmctl.runtime.engines.planted_weights import generate_weights
from llmctl.runtime.engines.rotary_tables import fill_rotary_tables
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

ACCEPTANCE, SEED = 0.66, 5


def plan(
    folder: Path,
    quantization: str | None,
    form: str = "planted",
    head_qformat: str | None = None,
    role: str = "target",
    **options: Any,
) -> EnginePlan:
    """That of a tiny target for a GPU, or of what drafts for it. options: of the build."""
    if not folder.exists():
        recipe = Recipe("tiny", "target", ACCEPTANCE, SEED, quantization)
        write_checkpoint(folder, recipe, config_only=True)
    load_format = LoadFormat("planted", SEED, role, ACCEPTANCE, head_qformat)
    return plan_build(
        folder,
        BuildRequest(**{"max_seq_len": 64, **options}),
        backend="cuda",
        load_format=load_format if form == "planted" else LoadFormat(form, SEED),
        with_binaries=False,
    )


def in_lockstep(engine: EnginePlan) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan of all ranks, and its tensors."""
    ranks = range(engine.config.num_ranks)
    weights = {
        name_on(rank, name): tensor
        for rank in ranks
        for name, tensor in _weights(engine, rank).items()
    }
    plan = lockstep_plan([engine.plan for _ in ranks])
    return plan, bind_plan(plan, weights, torch.zeros(plan.arena_bytes, dtype=torch.uint8))


def generated(engine: EnginePlan, rank: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of the plan, weights and activations, of a rank."""
    arena = torch.zeros(engine.plan.arena_bytes, dtype=torch.uint8)
    return bind_plan(engine.plan, _weights(engine, rank), arena)


def _weights(engine: EnginePlan, rank: int) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in (t for t in engine.plan.tensors if t.kind == "weight"):
        found = torch.zeros(tuple(map(int, tensor.shape)), dtype=getattr(torch, tensor.dtype))
        weights[tensor.name] = found
    fill_rotary_tables(engine.plan, weights)
    generate_weights(engine.config, engine.plan, weights, rank)
    return weights

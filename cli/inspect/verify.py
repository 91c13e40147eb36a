"""`llmctl inspect --verify`: what opening an engine checks, and more than opening has time for."""

from __future__ import annotations

from pathlib import Path

from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.validation.kernels import check_launches


def verify_engine(folder: Path) -> dict[str, int]:
    """How many operators, tensors, kernels and launches were checked, over all ranks.

    Launches are those of the largest steps of each kind. Raises what `open_engine` raises.
    """
    config = read_engine_config(folder)
    found = dict.fromkeys(("operators", "tensors", "kernels", "launches"), 0)
    for rank in range(config.num_ranks):
        plan, _ = open_engine(folder, rank)
        found["operators"] += len(plan.ops)
        found["tensors"] += len(plan.tensors)
        found["kernels"] += len(plan.kernels)
        found["launches"] += check_launches(config, plan)
    return found

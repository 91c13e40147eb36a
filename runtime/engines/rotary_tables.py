"""Rotary tables, which engine files define and do not hold: computed when an engine is loaded.

Their bits are the same on every device (`plugins.ops.rope_kv_write.table`), so ranks, and runs on
different machines, look up the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from llmctl.builder.engine_format import Plan, open_engine
from llmctl.errors import OutOfMemory
from llmctl.plugins.backends.host_memory import free_memory_bytes
from llmctl.plugins.ops.rope_kv_write.table import fill_rotary_table


def fill_rotary_tables(plan: Plan, weights: Mapping[str, torch.Tensor]) -> None:
    """Compute every table of the plan where it lies: float32 [positions, head size], by name."""
    for name, each in plan.rotary.items():
        fill_rotary_table(weights[name], each.frequencies, each.factor)


def open_with_tables(folder: Path, rank: int = 0) -> tuple[Plan, dict[str, torch.Tensor]]:
    """What `open_engine` gives, with the tables. Raises what it raises, and OutOfMemory."""
    plan, tensors = open_engine(folder, rank)
    return plan, tensors | make_rotary_tables(plan)


def make_rotary_tables(plan: Plan) -> dict[str, torch.Tensor]:
    """Every table of the plan by its tensor's name, in host memory.

    Raises OutOfMemory where they do not fit into what is free of it: what an engine from elsewhere
    says of its length has no other bound there. Devices have a memory plan.
    """
    shapes = {t.name: tuple(map(int, t.shape)) for t in plan.tensors if t.name in plan.rotary}
    needed = sum(4 * math.prod(shape) for shape in shapes.values())
    free = free_memory_bytes()
    if needed > free:
        raise OutOfMemory(
            f"the rotary tables take {needed / 1e9:.2f} GB; {free / 1e9:.2f} GB of memory are free",
            fix="build the engine again with a smaller --max-seq-len",
        )
    tables = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill_rotary_tables(plan, tables)
    return tables

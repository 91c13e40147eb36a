"""Stored heads of engines of several ranks for a GPU: packed, the rows of all ranks are those of
one rank, and what no rank has a share of is whole on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu import quantize_head

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import PlanOp
from llmctl.builder.engine_plan import EnginePlan
from llmctl.plugins.core.shares import is_share
from llmctl.plugins.ops.packed_linear import layout
from llmctl.plugins.schemes.table import find_form

RANKS = 2


def planned(examples: Path, head: Path, mode: str, ranks: int) -> EnginePlan:
    request = BuildRequest(
        max_batch_size=4,
        max_seq_len=96,
        tp_size=ranks,
        speculative_decoding_mode=mode,
        draft_model_dir=str(head),
    )
    return plan_build(examples / "demo-target", request, backend="cuda", with_binaries=False)


def values(engine: EnginePlan, name: str, rank: int) -> torch.Tensor:
    return torch.cat(list(engine.sources[name].chunks(engine.shards[rank])))


def numbers(engine: EnginePlan, op: PlanOp, role: str, rank: int) -> torch.Tensor:
    """The rows of a product's weight, scales or bias in their own order, padding included."""
    found = values(engine, op.inputs[role], rank)
    shapes = {tensor.name: tensor.shape for tensor in engine.plan.tensors}
    rows = int(shapes[op.outputs["out"]][1])
    if role == "weight":
        form = find_form(str(found.dtype).removeprefix("torch."), op.attributes)
        found = layout.numbers_of(found, rows, int(shapes[op.inputs["x"]][1]), form)
    return layout.restore(found, layout.plain_order(rows))


@pytest.mark.parametrize(
    ("mode", "is_fp8"), [("medusa", False), ("redrafter", False), ("redrafter", True)]
)
def test_rows_of_all_ranks_are_those_of_one(
    tmp_path: Path, repository: Path, mode: str, is_fp8: bool
) -> None:
    examples = repository / "examples"
    head = examples / f"demo-{mode}"
    if is_fp8:
        head = quantize_head(head, tmp_path / "head")
    whole, shared = (planned(examples, head, mode, ranks) for ranks in (1, RANKS))
    products = 0
    for name, graph in shared.plan.heads.items():
        ops = {op.name: op for op in whole.plan.heads[name].ops}
        for op in graph.ops:
            if not op.op.startswith("packed_linear"):
                for weight in set(op.inputs.values()) & set(shared.sources):
                    parts = [values(shared, weight, rank) for rank in range(RANKS)]
                    assert all(part.equal(parts[0]) for part in parts), weight
                continue
            assert is_share(op.outputs["out"]) and ("x_scale" in op.inputs) == is_fp8
            products += 1
            for role in {"weight", "weight_scale", "bias"} & set(op.inputs):
                wanted = numbers(whole, ops[op.name], role, 0).view(torch.uint8)
                found = [numbers(shared, op, role, rank) for rank in range(RANKS)]
                joined = torch.cat(found).view(torch.uint8)
                assert torch.equal(joined[: len(wanted)], wanted), (op.name, role)
                assert not joined[len(wanted) :].any(), "padding is zero"
    assert products == {"medusa": 9, "redrafter": 14}[mode], "all of them"

"""Engines whose config.json or plan says something else of their heads are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.hostile_engine import HostileEngine
from support.medusa import make_heads, save_heads

from llmctl.builder.engine_format import open_engine, read_engine_config, read_plan
from llmctl.builder.validation.draft_heads import check_draft_heads
from llmctl.errors import CorruptEngine


@pytest.fixture
def folder(new_model, save, build_engine, tmp_path) -> Path:
    target = save(new_model("llama", head_dim=64))
    heads = save_heads(tmp_path / "heads", make_heads(2, 1, 64, 131))
    mode = {"speculative_decoding_mode": "medusa", "draft_model_dir": str(heads)}
    return Path(build_engine(target, max_draft_len=8, **mode))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_heads", True),
        ("num_heads", "2"),
        ("num_layers", -1),
        ("choices", []),
        ("choices", {}),
        ("choices", [0]),
        ("choices", [[0], []]),
        ("choices", [[0, 0], [0]]),
        ("choices", [[0], [0]]),
        ("choices", [[-1]]),
        ("choices", [[10]]),
        ("choices", [["0"]]),
        ("choices", [[0], [0, 0], [0, 0, 0]]),
        ("choices", None),
    ],
)
def test_facts_that_no_build_writes_are_refused(folder, tmp_path, field, value):
    engine = HostileEngine.read(folder)
    engine.config["build_config"]["draft_heads"][field] = value
    with pytest.raises(CorruptEngine, match=f"draft_heads.{field} is"):
        read_engine_config(engine.write(tmp_path / "edited"))


def widen(engine: HostileEngine, num_requests: int) -> None:
    engine.plan["max_num_requests"] = num_requests


def narrow_logits(engine: HostileEngine) -> None:
    name = engine.plan["heads"]["medusa"]["outputs"]["logits.1"]
    engine.tensor(name)["shape"] = ["requests", 130]


EDITS = {
    "says 3 heads": lambda e: e.config["build_config"]["draft_heads"].update(num_heads=3),
    "the plan has the graphs": lambda e: e.plan["heads"].update(
        other=e.plan["heads"].pop("medusa")
    ),
    "draft_heads is no object": lambda e: e.config["build_config"].update(draft_heads=[1]),
    "'hidden' is wanted": lambda e: e.plan["heads"]["medusa"].update(
        inputs={"other": e.plan["outputs"]["hidden"]}
    ),
    "131|130": narrow_logits,
    "max_batch_size is 2, and the plan has 1": lambda e: widen(e, 1),
    "tokens or rows first": lambda e: widen(e, 0),
    "no more rows are wanted": lambda e: widen(e, 10**6),
}


def test_heads_that_the_plan_has_otherwise_are_refused(folder, tmp_path):
    open_engine(folder)
    for number, (what, change) in enumerate(EDITS.items()):
        engine = HostileEngine.read(folder)
        change(engine)
        with pytest.raises(CorruptEngine, match=what):
            open_engine(engine.write(tmp_path / f"edited{number}"))


@pytest.mark.parametrize("attribute", [{"ranks": 1}, {"pushed_to": 2}])
def test_a_head_that_waits_for_other_ranks_is_refused(folder, attribute):
    """Rank 0 may run it alone."""
    plan, config = read_plan(folder), read_engine_config(folder)
    graph = plan.heads["medusa"]
    last = replace(graph.ops[-1], attributes={**graph.ops[-1].attributes, **attribute})
    met = replace(plan, heads={"medusa": replace(graph, ops=(*graph.ops[:-1], last))})
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    check_draft_heads(config, plan, tensors)
    with pytest.raises(CorruptEngine, match="of head 'medusa' is over ranks"):
        check_draft_heads(config, met, tensors)

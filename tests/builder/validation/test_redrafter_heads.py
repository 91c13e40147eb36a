"""Engines whose config.json or plan says something else of a ReDrafter head are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hostile_engine import HostileEngine
from support.redrafter import save_head
from support.redrafter_engine import build, tensors_of

from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.heads.redrafter.names import FIRST, NEXT
from llmctl.errors import CorruptEngine


@pytest.fixture
def folder(new_model, save, tmp_path) -> Path:
    head = save_head(tmp_path / "head", tensors_of("silu"))
    return build(save(new_model("llama", head_dim=64)), tmp_path / "engine", head)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("recurrence", value) for value in ("gru", None, ["silu"])),
        *(("num_layers", value) for value in (-1, True, "2", None)),
        *(("exit_dim", value) for value in (0, 1.5, None)),
        *(("num_beams", value) for value in (0, 65, True, "3", None)),
        *(("draft_len_per_beam", value) for value in (0, 2000, None)),
        *(("greedy_search", value) for value in (0, "false", None)),
    ],
)
def test_facts_that_no_build_writes_are_refused(folder, tmp_path, field, value):
    engine = HostileEngine.read(folder)
    engine.config["build_config"]["draft_heads"][field] = value
    with pytest.raises(CorruptEngine, match=f"draft_heads.{field} is"):
        read_engine_config(engine.write(tmp_path / "edited"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"max_draft_len": 5}, "beams of 6 drafts together; max_draft_len is 5"),
        ({"speculative_decoding_mode": 4}, "draft_heads.num_heads is None"),
        ({"speculative_decoding_mode": 2}, "no head is of the speculative_decoding_mode"),
    ],
)
def test_facts_beside_other_limits_are_refused(folder, tmp_path, change, found):
    engine = HostileEngine.read(folder)
    engine.config["build_config"].update(change)
    with pytest.raises(CorruptEngine, match=found):
        read_engine_config(engine.write(tmp_path / "edited"))


def narrow(engine: HostileEngine, graph: str, side: str, name: str, columns: int) -> None:
    shape = engine.tensor(engine.plan["heads"][graph][side][name])["shape"]
    shape[1] = columns


def beams_of_others(engine: HostileEngine) -> None:
    engine.config["build_config"]["draft_heads"].update(num_beams=2, draft_len_per_beam=3)


def continue_rows_of_the_base(engine: HostileEngine) -> None:
    (op,) = [op for op in engine.plan["heads"][NEXT]["ops"] if op["op"] == "recurrence"]
    op["inputs"]["carry"] = engine.plan["outputs"]["hidden"]


def no_carry(engine: HostileEngine) -> None:
    """The state before is left out, and nothing reads it."""
    (op,) = [op for op in engine.plan["heads"][NEXT]["ops"] if op["op"] == "recurrence"]
    del op["inputs"]["carry"]
    engine.plan["heads"][NEXT]["inputs"].pop("carry")


EDITS = {
    "131|130": lambda e: narrow(e, NEXT, "outputs", "logits", 130),
    "128|127": lambda e: narrow(e, NEXT, "inputs", "context", 127),
    "64|63": lambda e: narrow(e, NEXT, "inputs", "carry", 63),
    "the plan has ": lambda e: e.plan["heads"].update(other=e.plan["heads"].pop(NEXT)),
    "to .redrafter.first.rnn_u.out., which nothing reads": lambda e: e.plan["heads"][FIRST][
        "outputs"
    ].pop("carry"),
    "max_batch_size . num_beams is 8, and the plan has 12": beams_of_others,
    "is 12, and the plan has 2": lambda e: e.plan.update(max_num_beams=2),
    "first, then sizes": lambda e: e.plan.update(max_num_beams=0),
    "no more rows are wanted": lambda e: e.plan.update(max_num_beams=10**6),
    "neither its own nor an input|but R is": continue_rows_of_the_base,
    "states are wanted|is used by no operator": no_carry,
}


def test_a_head_that_the_plan_has_otherwise_is_refused(folder, tmp_path):
    open_engine(folder)
    for number, (what, change) in enumerate(EDITS.items()):
        engine = HostileEngine.read(folder)
        change(engine)
        with pytest.raises(CorruptEngine, match=what):
            open_engine(engine.write(tmp_path / f"edited{number}"))

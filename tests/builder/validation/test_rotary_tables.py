"""Definitions of rotary tables that no `build` writes are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile_engine import LENGTH, Edited, HostileEngine, refuse, write_text

from llmctl.builder.engine_format import read_plan
from llmctl.errors import OutOfMemory
from llmctl.runtime.engines import rotary_tables

FREQUENCY = "float32 numbers from"
WRITE = "layers.1.self_attn.attention.rope_kv_write"


def table(engine: HostileEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.plan["rotary"]["rotary"]
    return found


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (0.1, FREQUENCY),  # no float32 number
        (0.0, FREQUENCY),
        (-0.5, FREQUENCY),
        (4.0, FREQUENCY),
        (1e300, FREQUENCY),
        (2.0**-90, FREQUENCY),
        (1, "int|is 1; float"),
        (True, "float is wanted"),
        ("0.5", "float is wanted"),
        (None, "float is wanted"),
    ],
)
def test_a_frequency_outside_its_limits_is_refused(
    edited: Edited, value: object, match: str
) -> None:
    def change(engine: HostileEngine) -> None:
        table(engine)["frequencies"][3] = value

    refuse(edited(change), match)


@pytest.mark.parametrize("value", [-1.0, 0.1, 2.0**21, 1e300, 1, None, "1.0"])
def test_a_factor_outside_its_limits_is_refused(edited: Edited, value: object) -> None:
    refuse(edited(lambda e: table(e).update(factor=value)), "factor|float is wanted")


CHANGES: dict[str, tuple[Callable[[HostileEngine], Any], str]] = {
    "one frequency less": (lambda e: table(e)["frequencies"].pop(), "14 columns"),
    "one frequency more": (lambda e: table(e)["frequencies"].append(1.0), "18 columns"),
    "no frequencies": (lambda e: table(e).update(frequencies=[]), "0 columns"),
    "no definition": (lambda e: e.plan["rotary"].clear(), "rotary"),
    "another name": (
        lambda e: e.plan["rotary"].update(evil=e.plan["rotary"].pop("rotary")),
        "'evil' is no weight",
    ),
    "an activation": (
        lambda e: e.plan["rotary"].update({"lm_head.out": table(e)}),
        "'lm_head.out' is no weight",
    ),
    "a stored weight": (
        lambda e: e.plan["rotary"].update({"lm_head.weight": table(e)}),
        "'lm_head.weight' is no weight of float32",
    ),
    "more positions than config.json says": (
        lambda e: e.tensor("rotary")["shape"].__setitem__(0, LENGTH + 1),
        "max_seq_len",
    ),
    "too many positions": (
        lambda e: e.tensor("rotary")["shape"].__setitem__(0, 2**28),
        "up to 134217728 positions",
    ),
    "a table that is stored": (
        lambda e: e.tensor("rotary").update(is_stored=True),
        "'rotary' is stored",
    ),
    "a bias that is a table": (
        lambda e: e.op("layers.1.self_attn.qkv_proj")["inputs"].update(bias="rotary"),
        "reads bias 'rotary', which is a rotary table",
    ),
    "a table that is a bias": (
        lambda e: e.op(WRITE)["inputs"].update(rotary="lm_head.weight"),
        "reads rotary 'lm_head.weight', which no rotary table defines",
    ),
    "an unknown field": (lambda e: table(e).update(theta=10000.0), "no readable plan"),
    "no field rotary": (lambda e: e.plan.pop("rotary"), "no readable plan"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_edited_definition_is_refused(edited: Edited, name: str) -> None:
    change, match = CHANGES[name]
    refuse(edited(change), match)


def test_every_graph_that_attends_looks_up_a_defined_table(
    engines: dict[str, tuple[HostileEngine, list[int]]], tmp_path: Path
) -> None:
    engine, _ = engines["eagle"]
    plan = read_plan(engine.write(tmp_path / "engine"))
    used = [
        {op.inputs["rotary"] for op in graph.ops if "rotary" in op.inputs}
        for graph in plan.graphs.values()
    ]
    assert all(len(tables) == 1 for tables in used) and set().union(*used) == set(plan.rotary)


def test_a_table_larger_than_free_memory_is_refused(
    engines: dict[str, tuple[HostileEngine, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, text = engines["fp8"]
    folder = engine.write(tmp_path / "engine")
    size = 4 * LENGTH * 16
    monkeypatch.setattr(rotary_tables, "free_memory_bytes", lambda: size)
    assert write_text(folder) == text
    monkeypatch.setattr(rotary_tables, "free_memory_bytes", lambda: size - 1)
    with pytest.raises(OutOfMemory, match="rotary tables take 0.00 GB") as refused:
        write_text(folder)
    assert "max-seq-len" in refused.value.fix

"""Thousands of edited engines: each is refused by name, or writes the untouched engine's text.

Hashes are made to fit, so nothing but the validator stands between an edit and the kernels. One
rule says which edits are left out: those that only say something else and cannot be told from what
a builder might have meant. They are other values of weights (flips below the header), two inputs of
one operator exchanged for each other (norms of query and key), and ids of special tokens. Other
frequencies of a rotary table write another text. Engines with heads write their text with drafts
of these: whatever the heads say, it is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hostile_engine import KINDS, HostileEngine, write_directory, write_text
from support.json_edits import ACTIONS, Edit, apply

from llmctl.cli.inspect.engine import describe_engine
from llmctl.errors import LlmctlError

Engines = dict[str, tuple[HostileEngine, list[int]]]
NUMBERS = (0, 1, -1, 2, 3, 8, 15, 16, 24, 25, 31, 48, 64, 2**15, 2**31 - 1, 2**31, 2**32, 2**53)
WORDS = (
    *("", "tokens", "rows", "evil", "float32", "bfloat16", "int8", "float8_e4m3fn", "rotary"),
    *("weight", "activation", "cpu", "cuda", "lm_head.weight", "lm_head.out", "logits"),
)
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-(2**64), 2**64),
    st.sampled_from(WORDS),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from((None, True, False, [], {}, [1], ["tokens", 32], 0.5, 1e-6, 1e300, "é\ud800")),
)
PLACES = st.integers(0, 2**20)
EDITS = st.tuples(
    st.sampled_from(ACTIONS),
    PLACES,
    PLACES,
    VALUES,
)
# of the plan's parts as often as one another, however many values they have
PARTS = ("ops", "ops", "tensors", "kv_cache", "outputs", "rotary", "")
HEAD_PARTS = ("heads", "heads", "heads", "tensors", "head_caches", "rotary", "")


def judge(folder: Path, engine: HostileEngine, text: list[int]) -> None:
    """Refused by name, or the text of the untouched engine, if it has that one's rotary tables."""
    try:
        found = write_text(folder)
    except LlmctlError as error:
        assert str(error) and error.fix
        with_plan = describe_or_refuse
    else:
        is_same = HostileEngine.read(folder).plan["rotary"] == engine.plan["rotary"]
        assert len(found) == len(text) and (found == text or not is_same)
        with_plan = describe
    with_plan(folder)


def describe(folder: Path) -> None:
    describe_engine(folder, read_gb_s=100.0)


def describe_or_refuse(folder: Path) -> None:
    try:
        describe(folder)
    except LlmctlError:
        return


@pytest.fixture
def search(request: pytest.FixtureRequest) -> Callable[..., None]:
    """search(share, check, *strategies): so much of --fuzz-cases, divided over the kinds."""

    def run(share: float, check: Callable[..., None], *strategies: Any) -> None:
        cases = max(1, int(request.config.getoption("--fuzz-cases") * share))
        limits = settings(
            max_examples=cases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        limits(given(*strategies)(check))()

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_edited_plans(search: Any, engines: Engines, tmp_path: Path, kind: str) -> None:
    engine, text = engines[kind]
    plan = json.dumps(engine.plan)

    def check(part: str, edits: list[Edit]) -> None:
        changed = json.loads(plan)
        for edit in edits:
            apply(changed[part] if part else changed, edit)
        hostile = HostileEngine(engine.config, engine.header, engine.metadata, changed, engine.data)
        judge(hostile.write(tmp_path / "engine"), engine, text)

    parts = HEAD_PARTS if engine.plan["heads"] else PARTS
    search(0.1, check, st.sampled_from(parts), st.lists(EDITS, min_size=1, max_size=3))


@pytest.mark.parametrize("kind", KINDS)
def test_edited_configs(search: Any, engines: Engines, tmp_path: Path, kind: str) -> None:
    engine, text = engines[kind]
    raw, config = engine.bytes(), json.dumps(engine.config)

    def check(part: str, edits: list[Edit]) -> None:
        changed = json.loads(config)
        for edit in edits:
            apply(changed[part] if part else changed, edit)
        write_directory(tmp_path / "engine", changed, raw)
        judge(tmp_path / "engine", engine, text)

    parts = st.sampled_from(("build_config", "build_config", "pretrained_config", "weights", ""))
    search(0.025, check, parts, st.lists(EDITS, min_size=1, max_size=2))


@pytest.mark.parametrize("kind", KINDS)
def test_edited_headers(search: Any, engines: Engines, tmp_path: Path, kind: str) -> None:
    engine, text = engines[kind]
    header = json.dumps(engine.header)

    def check(edits: list[Edit]) -> None:
        changed = json.loads(header)
        for edit in edits:
            apply(changed, edit)
        hostile = HostileEngine(engine.config, changed, engine.metadata, engine.plan, engine.data)
        judge(hostile.write(tmp_path / "engine"), engine, text)

    search(0.015, check, st.lists(EDITS, min_size=1, max_size=2))


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(search: Any, engines: Engines, tmp_path: Path, kind: str) -> None:
    """Bits of the length field and the header, or of config.json."""
    engine, text = engines[kind]
    raw = engine.bytes()
    length = 8 + int.from_bytes(raw[:8], "little")

    def check(flips: list[tuple[int, int]]) -> None:
        changed = bytearray(raw)
        for place, bit in flips:
            changed[place % length if place % 16 else place % 8] ^= 1 << bit
        write_directory(tmp_path / "engine", engine.config, bytes(changed))
        judge(tmp_path / "engine", engine, text)

    search(0.02, check, st.lists(st.tuples(PLACES, st.integers(0, 7)), min_size=1, max_size=2))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_grown_files(search: Any, engines: Engines, tmp_path: Path, kind: str) -> None:
    engine, text = engines[kind]
    raw = engine.bytes()

    def check(size: int) -> None:
        changed = raw[: size % len(raw)] if size % 4 else raw + bytes(1 + size % 200)
        write_directory(tmp_path / "engine", engine.config, changed)
        judge(tmp_path / "engine", engine, text)

    search(0.007, check, PLACES)

"""The tiny engines whose copies are edited, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile_engine import KINDS, Change, HostileEngine, build_tiny, write_text


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[HostileEngine, list[int]]]:
    """The engine and its text, by kind."""
    folder = tmp_path_factory.mktemp("tiny")
    made = {}
    for kind in KINDS:
        path = build_tiny(folder, kind)
        made[kind] = (HostileEngine.read(path), write_text(path))
    return made


@pytest.fixture
def edited(
    engines: dict[str, tuple[HostileEngine, list[int]]], tmp_path: Path
) -> Callable[..., Path]:
    """edited(change, kind) -> an engine directory that was changed, its hashes made to fit."""

    def edit(change: Change, kind: str = "fp8") -> Path:
        engine = engines[kind][0].copy()
        change(engine)
        return engine.write(tmp_path / "edited")

    return edit

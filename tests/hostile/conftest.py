"""One checkpoint and its engine; tests replace parts of copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.hostile import build, token_ids, write_checkpoint
from support.hostile import run as run_engine

PROMPT = ("--input-text", "def f")


@dataclass(frozen=True)
class Sound:
    """A checkpoint that nobody tampered with, its engine, and the tokens that one gives."""

    checkpoint: Path
    engine: Path
    ids: list[int]


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Built once."""
    folder = tmp_path_factory.mktemp("sound")
    checkpoint, engine = write_checkpoint(folder / "checkpoint"), folder / "engine"
    assert build(checkpoint, engine).code == 0
    return Sound(checkpoint, engine, token_ids(run_engine(engine, *PROMPT)))


@pytest.fixture
def checkpoint(sound: Sound, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    shutil.copytree(sound.checkpoint, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(scope="session")
def lasting(sound: Sound, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A copy of the checkpoint that outlives a test's examples, put back to what it was."""
    folder = tmp_path_factory.mktemp("lasting") / "checkpoint"

    def restored() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound.checkpoint, folder)
        return folder

    return restored

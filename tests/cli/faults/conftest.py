"""Disks that are full or read-only, and processes that can be stopped at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.disks import Mount, mounts
from support.forked import ForkServer
from support.forked_program import ForkedProgram


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """See `support.disks.mounts`."""
    with mounts(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def build_words(engines) -> Callable[[Path], list[object]]:
    """A command line that builds an engine there in a tenth of a second."""

    def words(output_dir: Path) -> list[object]:
        limits = ["--max-seq-len", 128, "--max-num-tokens", 64, "--log-level", "error"]
        checkpoint = engines.draft_checkpoint
        return ["build", "--checkpoint-dir", checkpoint, "--output-dir", output_dir, *limits]

    return words


@pytest.fixture(scope="session")
def quantize_words(engines) -> Callable[[Path], list[object]]:
    """A command line that quantizes a checkpoint there in a second."""

    def words(output_dir: Path) -> list[object]:
        size = ["--calib-size", 2, "--calib-max-seq-length", 16]
        model = engines.draft_checkpoint
        return ["quantize", "--model-dir", model, "--output-dir", output_dir, *size]

    return words


@pytest.fixture(scope="session")
def forked(
    tmp_path_factory: pytest.TempPathFactory, forked_program: ForkedProgram, build_words
) -> Iterator[ForkServer]:
    """Command lines as processes that share what `run` and `build` import."""
    folder = tmp_path_factory.mktemp("forked")
    server = ForkServer(folder, forked_program, like="run")
    assert server.warm(*build_words(folder / "warm")).code == 0
    yield server
    server.close()


@pytest.fixture(scope="session")
def forked_quantize(
    tmp_path_factory: pytest.TempPathFactory, forked_program: ForkedProgram, quantize_words
) -> Iterator[ForkServer]:
    """The same with what `quantize` imports, which takes seconds."""
    folder = tmp_path_factory.mktemp("forked-quantize")
    server = ForkServer(folder, forked_program, like="quantize")
    assert server.warm(*quantize_words(folder / "warm")).code == 0
    yield server
    server.close()


@pytest.fixture(scope="session")
def names() -> Callable[[Path], list[str]]:
    """Everything in a folder, hidden files too."""
    return lambda folder: sorted(path.name for path in folder.iterdir())

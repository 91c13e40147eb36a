"""Settings shared by every test: one BLAS thread, no network, derandomised property tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator

# Before torch is imported anywhere: two test workers share two cores, and more OpenMP threads
# than cores makes small matrix products many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
from hypothesis import settings
from support.cores import share_cores
from support.forked_program import ForkedProgram
from support.forked_ranks import fork_ranks

BEGAN = time.time()

# A shell starts background jobs with SIGINT ignored, and children inherit that; the tests that
# interrupt need it to work however they were started.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")

share_cores()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the soak is (tests/runtime/test_soak.py), and the search for edits of engines that
    are not refused (tests/builder/validation/test_fuzz.py); the full ones are 10000 and 100000."""
    parser.addoption("--soak-requests", type=int, default=100, help="requests of each soak")
    parser.addoption(
        "--fuzz-cases", type=int, default=2000, help="edited engines, of all kinds together"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Nothing that collecting makes is garbage: looking for some takes a quarter of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor will it be
        gc.enable()


REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def forked_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedProgram]:
    """The program as a process that need not import anything."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share it
        folder = folder.parent
    (folder / "program").mkdir(exist_ok=True)
    made = ForkedProgram(folder / "program")
    yield made
    made.close()


@pytest.fixture(scope="module")
def forked_ranks(forked_program: ForkedProgram) -> Iterator[None]:
    """Ranks that the tests of a module open in their own process need not import anything."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_ranks(forked_program, monkeypatch)
        yield


@pytest.fixture(scope="session")
def h200_rows(repository: Path) -> dict[str, float]:
    """What was measured on an H200, by name, in the units of docs/performance/h200.jsonl."""
    lines = (repository / "docs/performance/h200.jsonl").read_text().splitlines()
    return {row["name"]: row["value"] for row in map(json.loads, lines)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went: seconds of all phases by folder, over all workers, and how many kernels
    were compiled, half a second of CPU time each."""
    from llmctl.plugins.backends.cuda.compiler import cache_folder

    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = "/".join(report.nodeid.split("::")[0].split("/")[:-1])
                seconds[folder] = seconds.get(folder, 0.0) + report.duration
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{folder} {spent:.0f}" for folder, spent in parts if spent >= 1)
    if shown:
        terminalreporter.write_line(f"seconds by folder, all workers together: {shown}")
    compiled = sum(path.stat().st_mtime >= BEGAN for path in cache_folder().glob("*.kernel"))
    if compiled:
        terminalreporter.write_line(f"kernels compiled: {compiled}")

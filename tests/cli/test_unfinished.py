"""A signal at whichever line of the code that makes scratch files: none of them stays."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from llmctl import publish as publish_module
from llmctl.cli import main, output_files, signals
from llmctl.cli.run import result_files
from llmctl.cli.run.result_files import Files, ResultFiles
from llmctl.publish import open_scratch, publish, remove_unfinished, write_cached

MODULES = (publish_module, output_files, result_files)
SOURCES = {module.__file__ for module in MODULES}


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """A signal inside `created_mode` leaves another one."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_results(folder: Path) -> None:
    files = Files(csv=folder / "x.csv", jsonl=folder / "x.jsonl")
    with ResultFiles(files, SimpleNamespace(end_id=None), [], lambda text: None):
        pass


def check_outputs(folder: Path) -> None:
    output_files.require_writable(folder / "x.csv")


def publish_folder(folder: Path) -> None:
    with publish(folder / "out") as scratch:
        (scratch / "file").write_text("whole")


def fill_cache(folder: Path) -> None:
    write_cached(folder / "kernel", b"whole")


def interrupt(work: Callable[[Path], None], folder: Path, at: int) -> bool:
    """Do the work with a signal before line number `at` of it; whether it has as many."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise signals.Terminated
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(folder)
    except signals.Terminated:
        return True
    finally:
        sys.settrace(before)
    return False


# What a signal cuts short leaves open files to the collector, which warns of each.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [open_results, check_outputs, publish_folder, fill_cache])
def test_no_scratch_stays(tmp_path: Path, work: Callable[[Path], None]) -> None:
    finished = tmp_path / "finished"
    finished.mkdir()
    work(finished)
    finals = {path.name for path in finished.iterdir()}
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        os.umask(0o022)
        was_cut = interrupt(work, folder, at)
        remove_unfinished()
        found = {path.name for path in folder.iterdir()}
        assert found <= finals, f"a signal before line {at} left {found - finals}"
        if not was_cut:
            break
    gc.collect()  # here, where its warnings are expected
    assert at > 10 and found == finals


def test_the_program_removes_them_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(argv: list[str]) -> int:
        open_scratch(tmp_path / "file")
        open_scratch(tmp_path / "folder", is_folder=True)
        assert len(list(tmp_path.iterdir())) == 2
        return 143

    monkeypatch.setattr(main, "_run", cut)
    monkeypatch.setattr(main, "open_streams", lambda: None)
    monkeypatch.setattr(signals, "install_handlers", dict)
    monkeypatch.setattr(signals, "ignore_all", lambda: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit, match="143"):
        main.main()
    assert list(tmp_path.iterdir()) == []

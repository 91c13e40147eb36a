"""An artefact appears whole under its final name or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmctl import publish as publish_module
from llmctl.errors import OutOfDisk, OutputExists
from llmctl.publish import publish, require_space, write_cached


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_body_appears_under_the_final_name(tmp_path: Path) -> None:
    with publish(tmp_path / "deep" / "out") as scratch:
        (scratch / "sub").mkdir()
        (scratch / "sub" / "file").write_text("content")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "sub" / "file").read_text() == "content"
    assert leftovers(tmp_path / "deep") == ["out"]
    assert (tmp_path / "deep" / "out").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupted_body_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), publish(tmp_path / "out") as scratch:
        (scratch / "file").write_text("half")
        raise error
    assert leftovers(tmp_path) == []


def test_ctrl_c_leaves_no_half_of_a_cached_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, target: Path) -> None:
        assert leftovers(tmp_path) == [source.name]
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_cached(tmp_path / "kernel", b"whole")
    assert leftovers(tmp_path) == []


def test_ctrl_c_during_the_clean_up_does_not_cut_it_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = shutil.rmtree, []

    def impatient(path: Path, **options: bool) -> None:
        calls.append(path)
        if len(calls) < 3:
            raise KeyboardInterrupt
        original(path, **options)

    monkeypatch.setattr(shutil, "rmtree", impatient)
    with pytest.raises(ZeroDivisionError), publish(tmp_path / "x"):
        raise ZeroDivisionError
    assert len(calls) == 3 and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutOfDisk, match="full") as caught, publish(tmp_path / "out") as scratch:
        (scratch / "file").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.exit_code == 3
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_at_fsync_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(publish_module, "flush", full)
    with pytest.raises(OutOfDisk), publish(tmp_path / "out") as scratch:
        (scratch / "file").write_text("half")
    assert leftovers(tmp_path) == []


def test_too_little_space_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(OutOfDisk, match="free"):
        require_space(tmp_path / "not" / "yet", 1 << 62)
    require_space(tmp_path / "not" / "yet", 1)


def test_an_existing_output_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(OutputExists, match="already exists"), publish(tmp_path / "out"):
        pytest.fail("the body must not run")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_the_loser_of_a_race_is_told_and_the_winner_stays_whole(tmp_path: Path) -> None:
    both_inside = threading.Barrier(2)
    outcomes: list[str] = []

    def build(name: str) -> None:
        try:
            with publish(tmp_path / "out") as scratch:
                (scratch / "who").write_text(name)
                both_inside.wait(timeout=60)
            outcomes.append("won " + name)
        except OutputExists:
            outcomes.append("lost " + name)

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = (tmp_path / "out" / "who").read_text()
    assert sorted(outcomes) == sorted([f"won {winner}", f"lost {'ab'.replace(winner, '')}"])
    assert leftovers(tmp_path) == ["out"]


def test_kill_minus_nine_leaves_only_a_hidden_partial(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom llmctl.publish import publish\n"
        "with publish(Path(sys.argv[1]) / 'out') as scratch:\n"
        "    (scratch / 'file').write_text('half')\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    names = leftovers(tmp_path)
    assert len(names) == 1 and names[0].startswith(".out.") and names[0].endswith(".partial")
    # A later build into the same name works.
    with publish(tmp_path / "out") as scratch:
        (scratch / "file").write_text("whole")
    assert (tmp_path / "out" / "file").read_text() == "whole"

"""SIGKILL at any moment, and processes side by side: an output is whole or not there, and the next
attempt removes what was left and says so."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from llmctl.publish import remove_leftovers

KILLED = -signal.SIGKILL
LEFT = "which a killed process left"


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name; of an engine without the command line that it remembers."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    config = json.loads(found["config.json"])
    config.pop("command", None)
    return found | {"config.json": json.dumps(config).encode()}


def check_after_kill(forked, words, out: Path, whole: dict[str, bytes], moment: int) -> bool:
    """Kill a command at a moment and run it again; False once it ends before that."""
    out.parent.mkdir()
    ended = forked.run(*words(out), below=out.parent, kill_at=moment)
    if ended.code != KILLED:
        assert ended.code == 0, ended
        return False
    left = [path.name for path in out.parent.iterdir()]
    if out.exists():  # killed after it had its name
        assert left == [out.name]
    else:
        assert all(name.startswith(f".{out.name}.") and name.endswith(".partial") for name in left)
        again = forked.run(*words(out))
        assert again.code == 0, again
        assert again.err.count(LEFT) == len(left)
        assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert contents(out) == whole
    return True


def test_a_build_killed_at_any_moment_is_whole_or_not_there(forked, build_words, tmp_path):
    first = tmp_path / "first" / "engine"
    assert forked.run(*build_words(first)).code == 0
    whole = contents(first)
    for moment in itertools.count(1):
        out = tmp_path / str(moment) / "engine"
        if not check_after_kill(forked, build_words, out, whole, moment):
            break
    assert moment > 10


def test_a_quantization_killed_is_whole_or_not_there(forked_quantize, quantize_words, tmp_path):
    first = tmp_path / "first" / "checkpoint"
    last = forked_quantize.run(*quantize_words(first), below=first.parent).num_moments
    whole = contents(first)
    assert last > 10
    for moment in (3, last // 2, last):
        out = tmp_path / str(moment) / "checkpoint"
        assert check_after_kill(forked_quantize, quantize_words, out, whole, moment)


def wait_for(folder: Path, pattern: str, count: int) -> None:
    until = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < until, f"{count} files {pattern} did not come"
        time.sleep(0.005)


def test_two_builds_and_a_run_on_one_directory(forked, build_words, tmp_path):
    """Both builds are done but for the name when the run, and a third build, come."""
    out, go = tmp_path / "engine", tmp_path / "go"
    builds = [forked.start(*build_words(out), below=tmp_path, hold=go) for _ in range(2)]
    wait_for(tmp_path, "go.*", 2)
    run = ["run", "--engine-dir", out, "--max-output-len", 4, "--input-text", "x"]
    early = forked.run(*run)
    assert early.code == 1 and "error[EngineNotFound]" in early.err
    assert remove_leftovers(out) == []  # both are being written
    assert len(list(tmp_path.glob(".engine.*.partial"))) == 2
    third = forked.run(*build_words(out))
    assert third.code == 0 and LEFT not in third.err
    go.touch()
    for pid in builds:
        ended = forked.wait(pid)
        assert ended.code == 1 and "error[OutputExists]" in ended.err
    late = forked.run(*run)
    assert late.code == 0 and "Output [Text 0" in late.out
    assert not list(tmp_path.glob(".engine*"))


def test_two_runs_into_one_file_leave_one_of_both_whole(forked, engines, tmp_path):
    out, go = tmp_path / "out.csv", tmp_path / "go"
    run = ["run", "--engine-dir", engines.draft, "--max-output-len", 9, "--end-id", -1]
    pids = [
        forked.start(*run, "--input-text", text, "--output-csv", out, below=tmp_path, hold=go)
        for text in ("a", "b")
    ]
    wait_for(tmp_path, "go.*", 2)
    assert remove_leftovers(out) == [] and len(list(tmp_path.glob(".out.csv.*.partial"))) == 2
    go.touch()
    assert [forked.wait(pid).code for pid in pids] == [0, 0]
    (line,) = out.read_text().splitlines()
    assert len(line.split(",")) == 9 and not list(tmp_path.glob(".out*"))


def test_a_killed_run_leaves_a_file_that_the_next_one_removes(forked, engines, tmp_path, names):
    out = tmp_path / "out.csv"
    run = ["run", "--engine-dir", engines.draft, "--max-output-len", 3, "--input-text", "a"]
    words = [*run, "--output-csv", out]
    moments = forked.run(*words, below=tmp_path).num_moments
    out.write_text("old")
    assert forked.run(*words, below=tmp_path, kill_at=moments).code == KILLED
    assert out.read_text() == "old" and len(names(tmp_path)) == 2
    again = forked.run(*words)
    assert again.code == 0 and again.err.count(LEFT) == 1
    assert names(tmp_path) == ["out.csv"] and out.read_text() != "old"


# ---- what is taken for a leftover ----


def test_only_leftovers_of_that_name_are_removed(tmp_path):
    for name in (".out.abcd_123.partial", ".out.zzzzzzzz.partial"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / ".out.file0000.partial").write_text("half")
    kept = [".out.b.abcd1234.partial", ".out.abcd1234", "out", ".out.abc.partial", ".mine.partial"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.linklink.partial").symlink_to(tmp_path / "out")
    os.mkfifo(tmp_path / ".out.pipepipe.partial")
    removed = remove_leftovers(tmp_path / "out")
    assert [path.name for path in removed] == [
        ".out.abcd_123.partial",
        ".out.file0000.partial",
        ".out.zzzzzzzz.partial",
    ]
    special = [".out.linklink.partial", ".out.pipepipe.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *special])
    assert remove_leftovers(tmp_path / "none" / "out") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
def test_what_another_user_left_stays(tmp_path):
    path = tmp_path / ".out.abcd1234.partial"
    path.mkdir()
    os.chown(path, 12345, 12345)
    assert remove_leftovers(tmp_path / "out") == [] and path.exists()

"""A disk that fills up at each stage: OutOfDisk by name, and nothing half-written under a name.

`tmpfs`: file systems of a few kilobytes or a few files. `limit`: a limit on the size of one file,
which every user may set; the system reports it as another error of the same family.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmctl.publish import write_cached


def refuse(done, out: Path, names) -> None:
    """It ended as OutOfDisk, and what was begun is gone."""
    code, text = done.code, done.err + done.out
    assert code == 3 and "error[OutOfDisk]" in text, done
    assert "Traceback" not in text and not out.exists() and names(out.parent) == []


@pytest.fixture(params=["build", "quantize"])
def stage(request):
    """(what runs a command line, the command line for an output folder)."""
    server = "forked" if request.param == "build" else "forked_quantize"
    words = request.getfixturevalue(f"{request.param}_words")
    return request.getfixturevalue(server).run, words


def test_a_disk_for_too_few_files(stage, mount, names):
    """The first inodes are the file system's own and the scratch folder's."""
    run, words = stage
    ends = []
    for nr_inodes in range(1, 20, 2):
        out = mount(size="16m", nr_inodes=nr_inodes) / "out"
        ended = run(*words(out))
        ends.append(ended.code)
        if ended.code == 0:
            break
        refuse(ended, out, names)
    assert len(ends) > 3 and ends[-1] == 0 and (out / "config.json").is_file()


def test_a_disk_that_others_fill_meanwhile(stage, mount, names):
    """What it says is free is not there any more when it is written."""
    run, words = stage
    for kilobytes in (4, 256):
        out = mount(size=f"{kilobytes}k") / "out"
        ended = run(*words(out), has_space=True)
        refuse(ended, out, names)
        assert "is full" in ended.err


def test_files_that_may_not_grow(stage, tmp_path, names):
    """What stands for a full disk where nothing may be mounted."""
    run, words = stage
    out = tmp_path / "folder" / "out"
    ended = run(*words(out), most_bytes=40_000)
    refuse(ended, out, names)
    assert "ulimit -f" in ended.err and "is full" not in ended.err


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(stage, mount, names):
    run, words = stage
    out = mount(size="64k") / "out"
    ended = run(*words(out))
    refuse(ended, out, names)
    assert "GB free" in ended.err and "weights" not in ended.err


# ---- output files ----


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["tmpfs", "limit"])
def full_disk(request, tmp_path) -> Iterator[tuple[Path, Callable]]:
    """(a folder where a file of 4 KiB, an old one, can be and no second, what to write under)."""
    if request.param == "limit":
        folder = tmp_path / "folder"
        folder.mkdir()
        yield folder, lambda: file_limit(4096)
        return
    from contextlib import nullcontext

    yield request.getfixturevalue("mount")(size="8k"), nullcontext


RUN = ["--max-output-len", 400, "--end-id", -1, "--num-return-sequences", 8, "--input-text", "a"]
BENCH = ["--num-requests", 3, "--target-output-len", 16, "--target-input-len", 8]
OUTPUTS = {
    "run --output-csv": RUN,
    "run --output-npy": RUN,
    "run --output-jsonl": RUN,
    "run --output-log-probs-npy": RUN,
    "bench latency --raw": BENCH,
    "bench latency --report": BENCH,
    "bench latency --trace": BENCH,
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_file_that_does_not_fit_leaves_the_old_one(
    command, full_disk, llmctl, engines, names
):
    folder, limited = full_disk
    *words, option = command.split()
    out = folder / "out"
    out.write_text("old")
    engine = ["--engine-dir", engines.draft]
    with limited():
        done = llmctl(*words, *engine, *OUTPUTS[command], option, out)
    assert done.code == 3 and "error[OutOfDisk]" in done.err, done
    assert str(out) in done.err and "Traceback" not in done.err
    assert names(folder) == ["out"] and out.read_text() == "old"
    if words[0] == "bench":  # what was measured is shown all the same
        assert json.loads(done.out)["request_info"]["num_finished"] == 3
    else:
        assert done.out.count("Output [Text 0") == 8


@pytest.mark.parametrize("command", ["inspect", "dataset", "build"])
def test_side_files_that_do_not_fit(command, full_disk, llmctl, engines, names, build_words):
    folder, limited = full_disk
    lengths = ["--input-mean", 64, "--input-stdev", 0, "--output-mean", 4, "--output-stdev", 0]
    out = folder / "out"
    words = {
        "inspect": ["inspect", engines.draft, "--graph", folder / "out.html"],
        "dataset": ["dataset", "--tokenizer", engines.draft / "tokenizer", "--output", out,
                    "token-norm-dist", "--num-requests", 60, *lengths],
        "build": [*build_words(folder / "engine"), "--visualize-network", out],
    }[command]  # fmt: skip
    with limited():
        done = llmctl(*words)
    assert done.code == 3 and "error[OutOfDisk]" in done.err, done
    assert names(folder) == []


def test_a_cache_that_is_full_keeps_nothing_half_written(full_disk, names):
    folder, limited = full_disk
    with limited():
        write_cached(folder / "deep" / "file", bytes(100_000))
        assert names(folder / "deep") == []
        write_cached(folder / "deep" / "file", b"small")
    assert names(folder / "deep") == ["file"]
    assert (folder / "deep" / "file").read_bytes() == b"small"
    write_cached(folder / "deep" / "file" / "below", b"a file is no folder")


def test_a_bug_is_told_where_its_traceback_cannot_be_kept(
    llmctl, command_that_raises, monkeypatch, tmp_path
):
    command_that_raises(ZeroDivisionError("x"))
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path / "none"))
    done = llmctl("run")
    assert done.code == 70 and "error[Bug]: ZeroDivisionError: x" in done.err
    assert "Traceback" in done.err

"""Folders that cannot be written: refused before any work, and enough to read an engine from."""

from __future__ import annotations

import shutil

import pytest
from support.disks import make_read_only

OUTPUTS = ["--output-csv", "--output-npy", "--output-jsonl", "--output-cum-log-probs-npy"]
REPORTS = ["--raw", "--report", "--report-json", "--trace"]


@pytest.fixture
def read_only(mount, tmp_path, request):
    """A folder with a copy of an engine and a checkpoint in it, that cannot be written any more."""
    import os

    engines = request.getfixturevalue("engines")
    folder = mount(size="16m") if os.geteuid() == 0 else tmp_path / "folder"
    shutil.copytree(engines.draft, folder / "engine")
    shutil.copytree(engines.draft_checkpoint, folder / "checkpoint")
    make_read_only(folder)
    return folder


def test_nothing_begins_where_nothing_can_be_written(
    read_only, llmctl, engines, names, build_words, quantize_words, monkeypatch
):
    from llmctl.runtime.open import OpenEngines

    monkeypatch.setattr(OpenEngines, "__init__", lambda *_: pytest.fail("weights were read"))
    before = names(read_only)
    run = ["run", "--engine-dir", engines.draft, "--max-output-len", 3, "--input-text", "x"]
    bench = ["bench", "latency", "--engine-dir", engines.draft, "--num-requests", 1]
    tokenizer = engines.draft / "tokenizer"
    commands = [
        build_words(read_only / "new"),
        build_words(read_only / "deep" / "new"),
        quantize_words(read_only / "new"),
        *([*run, option, read_only / "file"] for option in OUTPUTS),
        *([*bench, option, read_only / "file"] for option in REPORTS),
        ["inspect", engines.draft, "--graph", read_only / "graph.html"],
        ["dataset", "--tokenizer", tokenizer, "--output", read_only / "x", "token-norm-dist",
         "--num-requests", 1, "--input-mean", 4, "--input-stdev", 0, "--output-mean", 4,
         "--output-stdev", 0],
    ]  # fmt: skip
    for words in commands:
        done = llmctl(*words)
        assert done.code == 2 and "error[BadConfig]" in done.err, (words, done)
        assert "written" in done.err and done.out == ""
    assert names(read_only) == before


def test_engines_and_checkpoints_are_read_from_there(read_only, llmctl, outputs, engines, tmp_path):
    text = ["--input-text", "def f():"]
    assert outputs(*text, engine=read_only / "engine") == outputs(*text, engine=engines.draft)
    assert llmctl("inspect", read_only / "engine").code == 0
    build = ["build", "--checkpoint-dir", read_only / "checkpoint", "--log-level", "error"]
    assert llmctl(*build, "--output-dir", tmp_path / "built").code == 0

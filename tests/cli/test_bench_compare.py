"""`llmctl bench --compare-drafting`: methods over the same requests, and what is refused."""

from __future__ import annotations

import json

import pytest
from support.bench_runs import SHORT
from support.eagle import make_head, save_head

from llmctl.cli.main import execute
from llmctl.cli.signals import Interrupted, Terminated
from llmctl.errors import OutOfMemory
from llmctl.runtime.open import OpenEngines


@pytest.fixture(scope="module")
def eagle(engines, tmp_path_factory):
    """The target with a random EAGLE head."""
    folder = tmp_path_factory.mktemp("eagle")
    config = json.loads((engines.target_checkpoint / "config.json").read_text())
    sizes = {
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": 100,
    }
    head = make_head(target_hidden=config["hidden_size"], **sizes)
    save_head(folder / "head", head, **sizes)
    build = ["build", "--checkpoint-dir", engines.target_checkpoint, "--output-dir",
             folder / "engine", "--max-seq-len", 512, "--max-batch-size", 8, "--max-num-tokens",
             128, "--speculative-decoding-mode", "eagle", "--draft-model-dir", folder / "head",
             "--max-draft-len", 6, "--eagle-layers", "0,1,1"]  # fmt: skip
    assert execute([str(word) for word in build]) == 0
    return folder / "engine"


def test_every_method_runs_the_same_requests(bench, engines, eagle, tmp_path):
    entries = f"draft={engines.draft},ngram,eagle={eagle},eagle-tree={eagle}"
    path = tmp_path / "report.json"
    # Long enough that the responses of a request are not all taken together.
    report, done = bench("latency", *SHORT, "--target-output-len", 96, "--num-requests", 3,
                         "--compare-drafting", entries, "--report-json", path)  # fmt: skip
    rows = {row["name"].partition("=")[0]: row for row in report["comparison"]["rows"]}
    assert list(rows) == ["plain", "draft", "ngram", "eagle", "eagle-tree"]
    assert json.loads(path.read_text()) == report
    for name, row in rows.items():
        assert row["num_same_outputs"] == row["num_pairs"] == 3, "drafts change no token"
        assert row["decode_tok_s"] == pytest.approx(1e3 / row["token_ms"])
        assert row["token_ms"] <= row["round_ms"] * 1.001
        assert row["tokens_per_round"] >= 1 and row["name"] in done.err
        assert row["draft_method"] == (None if name == "plain" else row["draft_method"])
    assert rows["plain"]["speedup"] == 1 and rows["plain"]["tokens_per_round"] == 1
    assert [rows[name]["draft_len"] for name in rows] == [0, 4, 4, 6, 6]
    assert rows["draft"]["weight_mb"] > rows["eagle"]["weight_mb"] > rows["plain"]["weight_mb"]
    assert rows["ngram"]["weight_mb"] == rows["plain"]["weight_mb"]
    assert rows["eagle"]["kv_kb_per_token"] > rows["plain"]["kv_kb_per_token"]
    speeds = {row["name"]: row["decode_tok_s"] for row in rows.values()}
    assert report["comparison"]["fastest"] == max(speeds, key=speeds.get)
    table = [line[2:].split()[:1] for line in done.err.splitlines() if line[:2] in ("> ", "  ")]
    assert table[-5:] == [["plain"], ["draft"], ["ngram"], ["eagle"], ["eagle-tree"]]
    marked = [line.split()[1] for line in done.err.splitlines() if line.startswith("> ")]
    assert marked == [report["comparison"]["fastest"].partition("=")[0]]
    assert "times plain" in done.err and "3 of 3" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(OutOfMemory("no room for weights"), 3), (Interrupted(), 130), (Terminated(), 143)],
)
def test_what_was_measured_before_an_engine_failed_is_reported(
    bench, engines, monkeypatch, tmp_path, error, code
):
    """And every engine that was opened is closed, so that no rank of it stays."""
    opened, closed = [], []

    class Engines(OpenEngines):
        def __init__(self, *given):
            if len(opened) == 2:
                raise error
            super().__init__(*given)
            assert opened == closed
            opened.append(self)

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr("llmctl.cli.bench.session.OpenEngines", Engines)
    path = tmp_path / "report.json"
    entries = f"ngram,draft={engines.draft}"
    report, done = bench("latency", *SHORT, "--num-requests", 2, "--compare-drafting", entries,
                         "--report-json", path, code=code)  # fmt: skip
    rows = report["comparison"]["rows"]
    assert [row["name"] for row in rows] == ["plain", "ngram"]
    assert report["comparison"]["not_measured"] == entries.split(",")[1:]
    assert report["is_partial"] and json.loads(path.read_text()) == report
    assert "PARTIAL: not measured: draft=" in done.err
    assert ("no room for weights" in done.err) == (code == 3)
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare-drafting", "nothing"], "has 'nothing'; entries NAME"),
        (["--compare-drafting", ""], "entries NAME"),
        (["--compare-drafting", "ngram,ngram"], "has 'ngram' twice"),
        (["--compare-drafting", "draft"], "'draft' without an engine"),
        (["--compare-drafting", "eagle"], "--compare-drafting eagle: the engine has no EAGLE head"),
        (["--compare-drafting", "medusa="], "has 'medusa='"),
        (["--compare-drafting", "ngram", "--draft-len", 3], "as their engines were built"),
        (["--compare-drafting", "ngram", "--sweep-draft-len", "1..2"], "as their engines"),
        (["--compare-drafting", "ngram", "--baseline"], "it goes without --baseline"),
        (["--compare-drafting", "ngram", "--adaptive-draft-len"], "without --adaptive-draft-len"),
        (["--compare-drafting", "ngram", "--synthetic-acceptance", 2], "without --synthetic-acc"),
        (["--compare-drafting", "ngram", "--raw", "x.jsonl"], "goes without --raw"),
        (["--compare-drafting", "ngram", "--ngram-config", "[4,2,[0]]"], "without drafts of one"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(llmctl, engines, argv, said):
    import re

    done = llmctl("bench", "latency", "--engine-dir", engines.target, *SHORT, *argv)
    assert done.code in (1, 2) and re.search(said, done.err), done.err
    assert "== plain" not in done.err


def test_a_fix_names_no_option_that_a_comparison_refuses(llmctl, engines):
    for engine_dir, entry, wanted in (
        (engines.target, "lookahead", "--lookahead_config"),
        (engines.target, f"draft-tree={engines.draft}", "--max_draft_len 16"),
        (engines.draft, f"draft={engines.target}", "swap the two engines"),
    ):
        words = ("--engine-dir", engine_dir, *SHORT, "--compare-drafting", entry, "--json")
        done = llmctl("bench", "latency", *words)
        fix = json.loads(done.out)["error"]["fix"]
        assert wanted in fix and fix.startswith(("rebuild", "swap")), fix
        assert " or " not in fix


def test_sizes_of_a_window_are_asked_for_where_the_engine_has_room_for_one(llmctl, engines):
    for engine_dir, has_room in ((engines.target, True), (engines.draft, False)):
        for sizes, first in (("auto", '--lookahead-config "'), ("[9,9,9]", "smaller sizes, ")):
            words = ("--max-output-len", 1, "--lookahead-config", sizes, "--json")
            done = llmctl("run", "--engine-dir", engine_dir, *words)
            fix = json.loads(done.out)["error"]["fix"]
            assert fix.startswith(first if has_room else "rebuild it with"), fix

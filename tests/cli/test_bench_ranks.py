"""`llmctl bench` of engines of several ranks: every way of drafting, what is reported of ranks, and
the loss of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from itertools import count
from typing import Any

import pytest
from support.bench_runs import SHORT

from llmctl.builder.engine_format import read_plan
from llmctl.cli.bench.hardware import Reads, weight_reads
from llmctl.errors import RankFailure
from llmctl.plugins.backends.cpu.binding import num_threads
from llmctl.runtime.engines.engine import kv_bytes_per_block
from llmctl.runtime.engines.leading_engine import LeadingEngine
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines

pytestmark = pytest.mark.usefixtures("forked_ranks")
LOAD = [*SHORT, "--num-requests", 4]
DRAFTS = {
    "draft engine of one rank": (["--draft-len", 3], 1),
    "draft engine of two": (["--draft-len", 3], 2),
    "ngram": (["--ngram-config", "[3,2,[0]]"], None),
    "lookahead": (["--lookahead-config", "[2,2,2]"], None),
}


@pytest.fixture
def bench(llmctl, rank_engines):
    """A benchmark of two ranks that succeeds: what it reports, and what people see."""

    def call(command: str, *argv: object) -> tuple[dict[str, Any], str]:
        done = llmctl("bench", command, "--engine-dir", rank_engines.target, *LOAD, *argv)
        assert done.code == 0, done.err
        return json.loads(done.out), " ".join(done.err.split())

    return call


@pytest.fixture
def drafting(engines, rank_engines):
    """Options that draft so, and the ranks of the draft engine."""

    def options(name: str) -> tuple[list[object], int | None]:
        words, ranks = DRAFTS[name]
        folder = {1: engines.draft, 2: rank_engines.draft}.get(ranks or 0)
        return [*words, *(["--draft-engine", folder] if folder else [])], ranks

    return options


@pytest.mark.parametrize(
    ("name", "command"), list(zip(DRAFTS, ("latency", "throughput") * 2, strict=True))
)
def test_drafts_change_no_token(bench, drafting, command, name):
    options, ranks = drafting(name)
    report, said = bench(command, *options, "--baseline", "--iterations", 2)
    assert report["request_info"]["num_finished"] == 8
    speedup = report["baseline"]["speedup"]
    assert (speedup["num_pairs"], speedup["num_same_outputs"]) == (8, 8)
    assert report["decoding_stats"]["draft_tokens"] > 0
    engine = report["engine"]
    assert (engine["num_ranks"], engine["draft_num_ranks"]) == (2, ranks)
    assert "(cpu, 2 ranks, " in said
    assert (" on 1 rank)" in said, " on 2 ranks)" in said) == (ranks == 1, ranks == 2)
    assert not multiprocessing.active_children()


def test_draft_lengths_are_swept(bench, drafting):
    (*_, flag, folder), _ = drafting("draft engine of two")
    # Of few tokens a busy machine may take all responses together, and there is no speed to report.
    long = ("--target-output-len", 24)
    report, said = bench("throughput", flag, folder, "--sweep-draft-len", "1,4", *long)
    assert [point["draft_len"] for point in report["sweep"]["rows"]] == [0, 1, 4]
    assert "recommended: " in said


def test_methods_are_compared(bench, engines, rank_engines):
    entries = f"draft={engines.draft},draft={rank_engines.draft},ngram"
    report, _ = bench("latency", "--compare-drafting", entries)
    plain, one, two, ngram = report["comparison"]["rows"]
    for row in (plain, one, two, ngram):
        assert row["num_same_outputs"] == row["num_pairs"] == 4
    # Two ranks hold embedding and norms twice; their KV caches are halves.
    assert two["weight_mb"] > one["weight_mb"] > plain["weight_mb"] == ngram["weight_mb"]
    assert two["kv_kb_per_token"] == one["kv_kb_per_token"] > plain["kv_kb_per_token"]


def test_tp_size_is_compared_with_the_engine(llmctl, rank_engines):
    line = ("bench", "latency", "--engine-dir", rank_engines.target, *LOAD, "--tp-size")
    assert llmctl(*line, 2).code == 0
    done = llmctl(*line, 4)
    assert done.code == 2 and "--tp-size is 4; the engine has 2 ranks" in done.err


# ---- the limit ----


def test_bytes_of_all_ranks_count_where_they_share_a_memory(engines, rank_engines, monkeypatch):
    from llmctl.runtime.drafting.draft_engine.method import DraftEngine

    opened = OpenEngines(
        check_engines(EngineOptions(rank_engines.target, DraftEngine(engines.draft, 3)))
    )
    try:
        shared = Reads.of(opened.opened)
        monkeypatch.setattr(type(opened.opened), "has_one_memory", False)
        own = Reads.of(opened.opened)
    finally:
        opened.close()
    target, draft = read_plan(rank_engines.target), read_plan(engines.draft)
    assert own.target_weights == weight_reads(target)
    assert own.target_kv_per_block == kv_bytes_per_block(target)
    assert shared.target_weights == 2 * own.target_weights
    assert shared.target_kv_per_block == 2 * own.target_kv_per_block
    for reads in (own, shared):  # the draft engine has one rank
        assert reads.draft_weights == weight_reads(draft)
        assert reads.draft_kv_per_block == kv_bytes_per_block(draft)


def test_the_bandwidth_is_that_of_the_threads_of_all_ranks(bench, monkeypatch):
    found = []

    def measure(num_bytes: int) -> float:
        found.append((num_bytes, num_threads()))
        return 1e10

    monkeypatch.setattr("llmctl.cli.bench.hardware._measure_cpu", measure)
    report, _ = bench("latency", "--num-threads", 1)
    assert found == [(pytest.approx(1e6 * report["engine"]["weight_mb"], rel=0.5), 2)]
    assert num_threads() == 1


# ---- a rank is lost ----


@pytest.fixture
def failing(monkeypatch):
    """Let the engines fail at a step as if rank 1 were lost."""

    def fail_at(number: int) -> None:
        steps = count(1)
        run = LeadingEngine.run

        def fail(self, step):
            if next(steps) >= number:
                raise RankFailure("rank 1 (process 7) was killed by SIGKILL", fix="run again")
            return run(self, step)

        monkeypatch.setattr(LeadingEngine, "run", fail)

    return fail_at


@pytest.mark.parametrize("options", [[], ["--compare-drafting", "ngram"]], ids=["one way", "two"])
def test_what_was_measured_before_a_rank_was_lost_is_reported(
    llmctl, rank_engines, failing, options
):
    """The loss ends the run: later requests, ways and methods are not tried."""
    failing(60)  # of 9 a request, 2 of them to warm up
    argv = ["bench", "latency", "--engine-dir", rank_engines.target, *SHORT, "--num-requests", 100]
    done = llmctl(*argv, *options)
    assert done.code == 1, done.err
    report = json.loads(done.out)
    assert report["is_partial"] and 0 < report["request_info"]["num_finished"] < 7
    assert report["request_info"]["num_failed"] == 0, "what was in flight was not measured"
    assert "PARTIAL: " in done.err
    assert done.err.count("error[RankFailure]: rank 1 (process 7) was killed by SIGKILL") == 1


def test_a_rank_that_is_killed_in_a_sweep_ends_it(program, rank_engines):
    argv = ["bench", "throughput", "--engine-dir", rank_engines.target, "--num-requests", 250,
            "--target-input-len", 16, "--target-output-len", 64, "--concurrency", 4,
            "--draft-engine", rank_engines.draft, "--sweep-draft-len", "1..4"]  # fmt: skip
    process = subprocess.Popen(
        [*program, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if " requests, " in line:
                break
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            (rank,) = map(int, file.read().split())
        os.kill(rank, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err, err
    assert json.loads(out)["is_partial"]
    assert f"error[RankFailure]: rank 1 (process {rank}) was killed by SIGKILL" in err

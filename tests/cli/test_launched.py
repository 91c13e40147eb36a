"""Command lines in a process that a launcher started with others: ranks of an engine, or copies."""

from __future__ import annotations

import json
import shutil

import pytest
from support.bench_runs import SHORT

import llmctl as package
from llmctl.errors import BadConfig, OutOfMemory
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines


@pytest.fixture
def two_ranks(rank_engines):
    """The target, as an engine of two ranks."""
    return rank_engines.target


@pytest.fixture
def rank(monkeypatch):
    """rank(n): this is process n of two."""

    def set_rank(number):
        job = {"RANK": number, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "test_launched"}
        for name, value in job.items():
            monkeypatch.setenv(name, str(value))

    return set_rank


@pytest.mark.parametrize("number", [0, 1, "neither"])
def test_an_engine_of_one_rank_runs_in_every_process(llmctl, run, engines, rank, number):
    """With drafts of another engine, too, and whatever the variables say."""
    rank(number)
    assert run("--input-text", "a b", "--draft-engine", engines.draft).code == 0
    done = llmctl("bench", "latency", "--engine-dir", engines.target, *SHORT, "--json",
                  "--compare-drafting", "ngram")  # fmt: skip
    assert done.code == 0 and len(json.loads(done.out)["comparison"]["rows"]) == 2
    with package.open(engines.target) as executor:
        assert len(list(executor.generate([5, 6], max_tokens=3))) == 3


def test_a_rank_whose_file_is_missing_is_found_before_any_is_started(run, two_ranks, tmp_path):
    folder = tmp_path / "engine"
    shutil.copytree(two_ranks, folder)
    (folder / "rank1.engine").unlink()
    done = run("--input-text", "a b", engine=folder)
    assert done.code == 1 and done.err.startswith("error[EngineNotFound]: ")
    assert "rank1.engine does not exist" in done.err


def test_a_draft_of_more_ranks_than_the_target_says_what_to_build(run, engines, two_ranks):
    done = run("--input-text", "a b", "--draft-engine", two_ranks)
    assert done.code == 2 and done.err.endswith("fix: build it with --tp-size 1\n")


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_of_one_engine_do_not_compare_several(llmctl, two_ranks, rank, number):
    rank(number)
    done = llmctl("bench", "latency", "--engine-dir", two_ranks, *SHORT, "--compare-drafting",
                  "ngram")  # fmt: skip
    assert done.code == 2 and "the 2 processes that torchrun started" in done.err, done.err
    assert "== plain" not in done.err


def test_engines_of_several_ranks_are_compared_without_a_launcher(llmctl, two_ranks):
    done = llmctl("bench", "latency", "--engine-dir", two_ranks, *SHORT, "--json", "--num-requests",
                  2, "--compare-drafting", "ngram")  # fmt: skip
    assert done.code == 0, done.err
    assert [row["num_same_outputs"] for row in json.loads(done.out)["comparison"]["rows"]] == [2, 2]


def test_ranks_end_with_what_they_were_opened_for(llmctl, run, two_ranks, monkeypatch):
    """Whether it succeeds or not."""
    closed = []
    close = OpenEngines.close
    monkeypatch.setattr(OpenEngines, "close", lambda self: (closed.append(self), close(self)))
    assert run("--input-text", "a b", engine=two_ranks).code == 0
    assert llmctl("bench", "latency", "--engine-dir", two_ranks, *SHORT).code == 0
    assert len(closed) == 2

    def fail(*given):
        raise OutOfMemory("no room for results")

    monkeypatch.setattr("llmctl.cli.run.session.print_rows", fail)
    assert run("--input-text", "a b", engine=two_ranks).code == OutOfMemory.exit_code
    assert len(closed) == 3


def test_a_benchmark_waits_for_ranks_as_long_as_it_is_told_to(llmctl, two_ranks, rank):
    rank(0)
    options = ["bench", "latency", "--engine-dir", two_ranks, *SHORT, "--rank-timeout"]
    done = llmctl(*options, 0.2)
    assert done.code == 1 and "rank 1 has not come within 0.2 s" in done.err, done.err
    assert "--rank-timeout is 0.0" in llmctl(*options, 0).err


def test_only_rank_0_opens_engines(two_ranks, rank):
    """A program that did not serve as a rank before is told so at once."""
    rank(1)
    with pytest.raises(BadConfig, match="this process is rank 1 of the 2 that torchrun started"):
        OpenEngines(check_engines(EngineOptions(two_ranks)))

"""Drafts from Medusa heads through the whole program: never another token than without."""

from __future__ import annotations

import json
import random
import subprocess

import pytest
from support.e2e import TREE_LEN, DemoPair, Outputs, cancel_some, run_all
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device

from llmctl.builder.heads.medusa.tree import parse_choices
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

ENGINE = "whole-fp8-medusa"  # heads know more of what the whole target writes


@pytest.fixture(scope="module")
def plain(demo: DemoPair, requests: list[Request]) -> Outputs:
    """What that target writes without heads, each request alone."""
    with demo.executor("whole-fp8", enable_block_reuse=False) as executor:
        return [run_all(executor, [request])[0] for request in requests]


@pytest.mark.parametrize("reuse", [False, True])
def test_heads_change_no_token(
    demo: DemoPair, requests: list[Request], plain: Outputs, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the trees of others, or from the cache."""
    options = {"enable_block_reuse": reuse, "max_num_tokens": 96}
    with demo.executor(ENGINE, "medusa", **options) as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 10
    assert len(stats.accepted_at_position) == 3, "as deep as the first nodes of the tree go"


def test_the_engine_decodes_plainly_where_no_drafts_are_asked_for(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    with demo.executor(ENGINE) as executor:
        assert run_all(executor, requests[:8]) == plain[:8]
        assert executor.get_speculation_stats().draft_tokens == 0


def test_how_much_is_drafted_follows_costs_unless_it_is_asked_for(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    """On a cpu most drafts of a whole tree are in vain, and so are most trees."""
    drafted = []
    for method in (Medusa(draft_len=TREE_LEN), Medusa(), Medusa(parse_choices("[[0],[0,0]]"))):
        options = EngineOptions(demo.engine(ENGINE), method)
        with OpenEngines(check_engines(options)).executor() as executor:
            assert run_all(executor, requests) == plain
            stats = executor.get_speculation_stats()
        drafted.append(stats.draft_tokens / stats.rounds)
    assert drafted[1] < 0.5 * drafted[0] and drafted[1] < drafted[2]


def test_narrow_windows_change_no_token(demo: DemoPair, requests: list[Request]) -> None:
    options = {"windows": WindowOptions((40,), 4), "enable_block_reuse": False}
    with demo.executor("whole-fp8", **options) as executor:
        wanted = run_all(executor, requests[:12])
    with demo.executor(ENGINE, "medusa", **options) as executor:
        assert run_all(executor, requests[:12]) == wanted


def test_cancelled_requests_leave_the_others_alone(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    with demo.executor(ENGINE, "medusa") as executor:
        for _ in range(3):
            cancel_some(executor, requests, plain, draw)


def test_the_cuda_host_drafts_from_heads_too(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    """Over the fake device, which has the CPU's arithmetic."""
    assert accepted_by_host(demo.engine(ENGINE), Medusa(), requests, plain) > 10


def test_device_rounds_draft_from_heads(
    demo: DemoPair, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device: rounds alone, and rounds between steps that the host controls, since
    some requests need it and prompts come in between."""
    alone = never_need_the_host(requests)
    beside = list(range(2, len(requests), 12))  # penalties, few tokens
    cases = ((Medusa(), alone[:4]), (Medusa(), alone + beside))
    runs = list(rounds_on_device(demo.engine(ENGINE), cases, requests, plain, monkeypatch))
    assert [run.stats.accepted_tokens > 3 and run.num_rounds > 3 for run in runs] == [True] * 2
    for run in runs:
        assert run.draft_len == TREE_LEN and len(run.stats.accepted_at_position) <= 4


def test_from_the_command_line(demo: DemoPair) -> None:
    """`run` with the engine's tree and with another, and what it refuses before weights."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*demo.program.command, "run", "--max_output_len", "24"]
        command += ["--input_text", "def read_lines(path):", *options]
        return subprocess.run(command, capture_output=True, text=True)

    folder = str(demo.engine(ENGINE))
    texts = set()
    for choices in ("auto", "[[0, 0, 0], [1]]"):
        done = run("--engine_dir", folder, "--medusa_choices", choices, "--verify-exact")
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())  # lines end where figures let them
        assert "tokens per round" in said and "exact: 24 tokens" in said
        texts.add(done.stdout)
    assert len(texts) == 1
    for options, found in (
        (("--medusa_choices", "mc_sim_7b_63"), "63 drafts per round are requested"),
        (("--medusa_choices", "[[0, 0, 0, 0, 0]]"), "a path of 5 tokens; the engine has 4 heads"),
        (("--medusa_choices", "auto", "--ngram-config", "[4,2,[0]]"), "one method drafts at a"),
        (("--ngram-config", "[4,2,[0]]"), "cannot verify drafts"),
    ):
        done = run("--engine_dir", folder, *options)
        assert done.returncode in (1, 2) and found in done.stderr, done.stderr
    done = run("--engine_dir", str(demo.engine("whole-fp8")), "--medusa_choices", "auto")
    assert done.returncode == 1 and "no Medusa heads" in done.stderr
    done = run("--engine_dir", folder, "--medusa_choices", "mc_sim_7b_63", "--draft-len", "9")
    assert done.returncode == 0, done.stderr


def test_a_tree_is_tuned_by_a_load(demo: DemoPair) -> None:
    """`bench` counts how often heads are right; what it prints is a value of --medusa-choices."""
    engine = ["--engine-dir", demo.engine(ENGINE), "--medusa-choices", "[[0],[1]]"]
    load = ["--tune-tree", "5", "--num-requests", "2", "--target-output-len", "32"]
    report = json.loads(demo.llmctl("bench", "latency", "--json", *engine, *load))
    assert len(report["decoding_stats"]["acceptance_at_position"]) == 1, "as deep as the tree"
    tree = report["tree"]
    assert 1 <= len(tree["medusa_choices"]) <= 5 and tree["num_rounds"] > 20
    assert len(tree["accuracy_by_head_and_rank"]) == 4, "all heads are asked"
    parse_choices(str(tree["medusa_choices"]))

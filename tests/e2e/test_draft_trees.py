"""Trees from a draft engine through the whole program: never another token than without."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.e2e import DemoPair, Outputs, cancel_some, run_all
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device

import llmctl
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig

TREES = (DraftTree(4, 3, 12), DraftTree(6, 4, 24), DraftTree(1, 4, 4))


@dataclass(frozen=True)
class Pair:
    """Both engines; `opened(tree, ...)` is a running executor of them."""

    target: Path
    draft: Path
    opened: Callable[..., AbstractContextManager[Executor]]


@pytest.fixture(scope="module")
def pair(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("trees")
    for role, num_drafts in (("target", 24), ("draft", 3)):
        demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized(role),
                    "--output-dir", folder / role, "--max-batch-size", 16, "--max-seq-len", 1024,
                    "--speculative-decoding-mode", "draft_tokens_external",
                    "--max-draft-len", num_drafts)  # fmt: skip

    @contextmanager
    def running(tree: DraftTree, **options: Any) -> Iterator[Executor]:
        method = DraftEngine(folder / "draft", tree=tree)
        engines = EngineOptions(folder / "target", method, **options)
        with OpenEngines(check_engines(engines)).executor() as executor:
            yield executor

    return Pair(folder / "target", folder / "draft", running)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees_change_no_token(
    pair: Pair, requests: list[Request], plain: Outputs, tree: DraftTree, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the drafts of others, or from the cache."""
    options = {"enable_block_reuse": reuse, "max_num_tokens": 420}
    with pair.opened(tree, **options) as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 40
    assert len(stats.accepted_at_position) == tree.depth, "whole paths were accepted"


def test_cancelled_requests_leave_the_others_alone(
    pair: Pair, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    with pair.opened(TREES[0]) as executor:
        for _ in range(3):
            cancel_some(executor, requests, plain, draw)


def test_blocks_that_leave_the_cache_and_return_change_no_token(
    pair: Pair, requests: list[Request], plain: Outputs
) -> None:
    options = {"max_tokens": 40 * 32, "host_memory_bytes": 8 << 20}
    with pair.opened(TREES[0], **options) as executor:
        for _ in range(2):
            assert run_all(executor, requests) == plain


def test_adaptive_lengths_and_narrow_windows_change_no_token(
    demo: DemoPair, pair: Pair, requests: list[Request], plain: Outputs
) -> None:
    with pair.opened(TREES[0], adaptive_draft_len=True) as executor:
        assert run_all(executor, requests) == plain
    options = {"windows": WindowOptions((40,), 4), "enable_block_reuse": False}
    with demo.executor("target-fp8", **options) as executor:
        wanted = run_all(executor, requests[:12])
    with pair.opened(TREES[0], **options) as executor:
        assert run_all(executor, requests[:12]) == wanted


def test_a_tree_has_more_tokens_a_round_than_the_chain_of_its_depth(
    demo: DemoPair, pair: Pair, requests: list[Request]
) -> None:
    """Greedy requests, which alone have trees."""
    greedy = [Request(request.input_token_ids, 32, SamplingConfig()) for request in requests]
    lengths = []
    for method in (DraftEngine(pair.draft, 4), DraftEngine(pair.draft, tree=DraftTree(4, 3, 16))):
        options = EngineOptions(pair.target, method)
        with OpenEngines(check_engines(options)).executor() as executor:
            run_all(executor, greedy)
            stats = executor.get_speculation_stats()
        lengths.append(1 + stats.accepted_tokens / stats.rounds)
    assert lengths[1] > lengths[0] + 0.1


def test_the_cuda_host_drafts_trees_too(
    demo: DemoPair, pair: Pair, requests: list[Request], plain: Outputs
) -> None:
    """Over the fake device. Its steps have a token for every place of a tree, so it needs a draft
    engine with as much room."""
    method = DraftEngine(pair.target, tree=TREES[0])
    assert accepted_by_host(pair.target, method, requests, plain) > 100


def test_rounds_of_the_device_draft_trees_and_change_no_token(
    pair: Pair, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device, requests that are sampled among them."""
    asked = never_need_the_host(requests)
    cases: list[tuple[DraftMethod, list[int]]] = [
        (DraftEngine(pair.target, tree=tree), asked) for tree in (TREES[0], TREES[2])
    ]
    runs = list(rounds_on_device(pair.target, cases, requests, plain, monkeypatch))
    for run, most in zip(runs, (5, 2), strict=True):
        assert run.num_rounds > 1
        length = 1 + run.stats.accepted_tokens / run.stats.rounds
        assert 0.7 * most < length <= most, "the target knows its own text"


def test_llmctl_open_takes_a_tree(pair: Pair, requests: list[Request], plain: Outputs) -> None:
    with llmctl.open(pair.target, draft=pair.draft, draft_tree="4,3,12") as executor:
        assert run_all(executor, requests[:4]) == plain[:4]


def test_bench_compares_and_sweeps_trees(demo: DemoPair, pair: Pair) -> None:
    """The same tokens in every way."""
    load = ["bench", "latency", "--engine-dir", pair.target, "--num-requests", 2, "--json",
            "--target-input-len", 20, "--target-output-len", 24]  # fmt: skip
    entries = f"draft={pair.draft},draft-tree={pair.draft}"
    report = json.loads(demo.llmctl(*load, "--compare-drafting", entries))
    rows = {row["name"].partition("=")[0]: row for row in report["comparison"]["rows"]}
    assert list(rows) == ["plain", "draft", "draft-tree"]
    assert all(row["num_same_outputs"] == 2 for row in rows.values())
    sweep = ["--draft-engine", pair.draft, "--sweep-draft-tree", "2,2,4;4,3,12"]
    report = json.loads(demo.llmctl(*load, *sweep))
    lengths = [row["acceptance_length"] for row in report["sweep"]["tree_rows"]]
    assert lengths[1] > lengths[0] > 1


def test_from_the_command_line(demo: DemoPair, pair: Pair) -> None:
    def run(*options: object) -> subprocess.CompletedProcess[str]:
        command = [*demo.program.command, "run", "--engine_dir", pair.target, "--max_output_len",
                   "24", "--input_text", "def read_lines(path):", *options]  # fmt: skip
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    done = run("--draft-engine", pair.draft, "--draft-tree", "4,3,12", "--verify-exact")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())  # lines end where figures let them
    assert "tokens per round" in said and "exact: 24 tokens" in said
    for options, found in (
        (("--draft-engine", pair.draft, "--draft-tree", "6,4,25"), "built for max_draft_len 24"),
        (("--draft-engine", pair.draft, "--draft-tree", "4,5,24"), "needs 5 tokens of a sequence"),
        (("--draft-engine", pair.draft, "--draft-tree", "4,3"), "depth,branch,nodes"),
        (("--draft-tree", "4,3,12"), "given without a draft"),
    ):
        done = run(*options)
        assert done.returncode in (1, 2) and found in done.stderr, done.stderr

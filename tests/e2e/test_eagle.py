"""Drafts from an EAGLE head through the whole program: never another token than without."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.e2e import DemoPair, Outputs, cancel_some, float_target, known_texts, run_all
from support.eagle import DEMO_SHAPE, fit_head
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device

from llmctl.builder.engine_format import parse_choices
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig

Opened = Callable[..., AbstractContextManager[Executor]]

SHAPE = replace(DEMO_SHAPE, taps=(0, 2, 3))
DRAFT_LEN = 5
DRAFTING = Eagle(DRAFT_LEN)
CHOICES = parse_choices("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0],[1,0,0]]")
TREES = {"dynamic": Eagle(12, num_offers=4), "static": Eagle(choices=CHOICES)}
SIBLINGS = Eagle(num_offers=3)
METHODS = {"chain": DRAFTING, **TREES}


@pytest.fixture(scope="module")
def engine(
    demo: DemoPair,
    requests: list[Request],
    plain: Outputs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """With a head that knows what comes of the requests."""
    folder = tmp_path_factory.mktemp("eagle")
    model = float_target(demo.checkpoint("target"))
    fit_head(model, known_texts(requests, plain), SHAPE).write(folder / "head", "demo-target")
    for name, rows in (("engine", 3), ("narrow", 1)):
        demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized("target"),
                    "--output-dir", folder / name, "--max-batch-size", 16, "--max-seq-len", 1024,
                    "--speculative-decoding-mode", "eagle", "--max-draft-len", 12,
                    "--max-non-leaves-per-layer", rows,
                    "--draft-model-dir", folder / "head")  # fmt: skip
    return folder / "engine"


@pytest.fixture(scope="module")
def opened(engine: Path) -> Opened:
    """opened(method, ...) -> a running executor of the engine; None: without drafts."""

    @contextmanager
    def running(method: DraftMethod | None = DRAFTING, **options: Any) -> Iterator[Executor]:
        engines = EngineOptions(engine, method or PlainDecoding(), **options)
        with OpenEngines(check_engines(engines)).executor() as executor:
            yield executor

    return running


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", METHODS)
def test_a_head_that_knows_the_text_changes_no_token(
    opened: Opened, requests: list[Request], plain: Outputs, kind: str, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the drafts of others, or from the cache."""
    options = {"enable_block_reuse": reuse, "max_num_tokens": 220}
    with opened(METHODS[kind], **options) as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 100
    deepest = {"chain": DRAFT_LEN, "dynamic": 8, "static": CHOICES.depth}[kind]
    assert len(stats.accepted_at_position) == deepest, "whole paths were accepted"


def test_the_engine_decodes_plainly_where_no_drafts_are_asked_for(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    with opened(None) as executor:
        assert run_all(executor, requests[:8]) == plain[:8]
        assert executor.get_speculation_stats().draft_tokens == 0


def test_narrow_windows_change_no_token(
    demo: DemoPair, opened: Opened, requests: list[Request]
) -> None:
    options = {"windows": WindowOptions((40,), 4), "enable_block_reuse": False}
    with demo.executor("target-fp8", **options) as executor:
        wanted = run_all(executor, requests[:12])
    for method in (DRAFTING, TREES["dynamic"]):
        with opened(method, **options) as executor:
            assert run_all(executor, requests[:12]) == wanted


def test_cancelled_requests_leave_the_others_alone(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    for method in (DRAFTING, TREES["dynamic"]):
        with opened(method) as executor:
            for _ in range(3):
                cancel_some(executor, requests, plain, draw)


def test_blocks_that_leave_the_cache_and_return_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    """The head's blocks go to host memory and back with the target's."""
    options = {"max_tokens": 40 * 32, "host_memory_bytes": 8 << 20}
    for method in (DRAFTING, TREES["dynamic"]):
        with opened(method, **options) as executor:
            for _ in range(2):
                assert run_all(executor, requests) == plain


def test_adaptive_lengths_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    for method in (DRAFTING, TREES["dynamic"]):
        with opened(method, adaptive_draft_len=True) as executor:
            assert run_all(executor, requests) == plain


def test_the_cuda_host_drafts_from_a_head_too(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    """Over the fake device, which has the CPU's arithmetic. A level of a tree takes as many rows
    there as the tree has places."""
    assert accepted_by_host(engine, DRAFTING, requests, plain) > 100
    small = {"dynamic": Eagle(3, num_offers=3), "static": Eagle(3, choices=CHOICES)}
    for method in small.values():
        assert accepted_by_host(engine, method, requests, plain) > 40


def test_device_rounds_draft_from_a_head(
    engine: Path, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device: rounds alone, and rounds between steps that the host controls; a prompt
    that is in the cache, and one that comes while others generate."""
    alone = never_need_the_host(requests)
    cases = (
        (DRAFTING, alone[:4]),
        (DRAFTING, [*alone, *range(2, len(requests), 12), *alone[:2]]),
        (Eagle(1), alone[:3]),
    )
    runs = list(rounds_on_device(engine, cases, requests, plain, monkeypatch))
    assert [run.stats.accepted_tokens > 4 and run.num_rounds > 1 for run in runs] == [True] * 3
    for run in runs:
        assert len(run.stats.accepted_at_position) == run.draft_len, "whole chains are accepted"


def test_device_rounds_draft_trees_as_the_host_does(
    engine: Path, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device: rounds alone, with sampled requests whose drafts are chains, and rounds
    between steps that the host controls."""
    alone = never_need_the_host(requests)
    mixed = [*alone, *range(2, len(requests), 12), *alone[:2]]
    for method in TREES.values():
        cases = ((method, alone[:4]), (method, mixed), (replace(method, draft_len=1), alone[:3]))
        runs = list(rounds_on_device(engine, cases, requests, plain, monkeypatch))
        assert [run.stats.accepted_tokens > 4 and run.num_rounds > 1 for run in runs] == [True] * 3
        depths = [len(run.stats.accepted_at_position) for run in runs]
        assert depths == [8, 8, 1] if method.choices is None else depths == [4, 4, 1]


def test_the_device_accepts_what_the_host_would(
    engine: Path, opened: Opened, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device: the trees are the same, to the end of a text."""
    asked = [Request(request.input_token_ids, 16, SamplingConfig()) for request in requests[:3]]
    with opened(None) as executor:
        plain = run_all(executor, asked)
    everyone = list(range(len(asked)))
    narrow = engine.parent / "narrow"  # where drafts are followed one by one
    for own, method in (*((engine, method) for method in TREES.values()), (narrow, SIBLINGS)):
        (found,) = rounds_on_device(own, [(method, everyone)], asked, plain, monkeypatch)
        assert found.num_rounds > 10 and found.stats.accepted_tokens > 5
        assert found.stats.accepted_tokens == accepted_by_host(own, method, asked, plain)


def test_from_the_command_line(demo: DemoPair, engine: Path) -> None:
    """`run` with as many drafts as built for and with fewer, and what it refuses."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*demo.program.command, "run", "--max_output_len", "24"]
        command += ["--input_text", "def read_lines(path):", *options]
        return subprocess.run(command, capture_output=True, text=True)

    folder = str(engine)
    texts = set()
    for options in (
        ("--eagle_choices", "auto", "--draft-len", "5"),
        ("--eagle-choices", "auto", "--draft-len", "2"),
        ("--eagle_choices", "[[0],[1],[0,0],[1,0]]"),
        ("--eagle_use_dynamic_tree",),
        ("--eagle-use-dynamic-tree", "--eagle_dynamic_tree_max_top_k", "2", "--draft-len", "9"),
        ("--eagle-use-dynamic-tree", "--eagle-dynamic-tree-depth", "3"),
    ):
        done = run("--engine_dir", folder, *options, "--verify-exact")
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())  # lines end where figures let them
        assert "tokens per round" in said and "exact: 24 tokens" in said
        texts.add(done.stdout)
    assert len(texts) == 1
    for options, found in (
        (("--eagle-choices", "auto", "--draft-len", "13"), "the engine was built for 12"),
        (("--eagle-choices", "mc_sim_7b_63", "--draft-len", "12"), "expands 10 drafts of one"),
        (("--eagle-choices", "[[0],[1],[2],[3,0]]", "--draft-len", "13"), "built for 12"),
        (("--eagle-choices", "[[0],[11]]"), "--eagle-choices holds the path [11]"),
        (("--eagle-use-dynamic-tree", "--eagle-choices", "auto"), "a tree is of one kind"),
        (("--eagle-dynamic-tree-max-top-k", "3"), "is for --eagle-use-dynamic-tree"),
        (("--eagle-use-dynamic-tree", "--eagle-dynamic-tree-max-top-k", "11"), "from 1 to 10"),
        (("--eagle-dynamic-tree-depth", "3"), "is for --eagle-use-dynamic-tree"),
        (("--eagle-use-dynamic-tree", "--eagle-dynamic-tree-depth", "0"), "from 1 to 64"),
        (("--eagle-choices", "auto", "--medusa-choices", "auto"), "one method drafts at a"),
        (("--medusa-choices", "auto"), "no Medusa heads"),
        (("--ngram-config", "[4,2,[0]]"), "cannot verify drafts"),
        (("--eagle-choices", "auto", "--eagle-posterior-threshold", "0.1"), "--typical-acceptance"),
    ):
        done = run("--engine_dir", folder, *options)
        assert done.returncode in (1, 2) and found in done.stderr, done.stderr
    done = run("--engine_dir", str(demo.engine("target-fp8")), "--eagle-choices", "auto")
    assert done.returncode == 1 and "no EAGLE head" in done.stderr

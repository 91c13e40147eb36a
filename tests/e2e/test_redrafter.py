"""Drafts from a ReDrafter head through the whole program: never another token than without."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.e2e import DemoPair, Outputs, cancel_some, float_target, run_all
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device
from support.redrafter import RECURRENCES, fit_head, make_head, save_as, save_head

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

Opened = Callable[..., AbstractContextManager[Executor]]

TREE_LEN, NUM_BEAMS = 15, 3
DRAFTING = RecurrentDrafting(None, TREE_LEN // NUM_BEAMS)  # always whole beams


def build(demo: DemoPair, head: Path, folder: Path, num_beams: int, length: int) -> Path:
    demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized("target"),
                "--output-dir", folder, "--max-batch-size", 16, "--max-seq-len", 1024,
                "--speculative-decoding-mode", "redrafter", "--draft-model-dir", head,
                "--redrafter-num-beams", num_beams,
                "--redrafter-draft-len-per-beam", length)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def engine(
    demo: DemoPair,
    requests: list[Request],
    plain: Outputs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """With a head that knows what comes of the requests."""
    folder = tmp_path_factory.mktemp("redrafter")
    texts = [
        [*request.input_token_ids[-32:], *output[0]]
        for request, output in zip(requests, plain, strict=True)
    ]
    head = save_head(
        folder / "head", fit_head(float_target(demo.checkpoint("target")), texts, 4096)
    )
    return build(demo, head, folder / "engine", NUM_BEAMS, TREE_LEN // NUM_BEAMS)


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
def test_a_head_that_knows_the_text_changes_no_token(
    opened: Opened, requests: list[Request], plain: Outputs, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the trees of others, or from the cache."""
    options = {"enable_block_reuse": reuse, "max_num_tokens": 96}
    with opened(**options) as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 100
    assert len(stats.accepted_at_position) == TREE_LEN // 3, "whole beams were accepted"


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_head_that_knows_nothing_changes_no_token(
    demo: DemoPair, requests: list[Request], plain: Outputs, recurrence: str, tmp_path: Path
) -> None:
    """Of every recurrence, with other beams, and fewer of them than it was built for."""
    tensors = make_head(384, 4096, num_layers=1, exit_dim=96, is_rnn=recurrence != "sum")
    head = save_as(tmp_path / "head", recurrence, tensors)
    folder = build(demo, head, tmp_path / "engine", 6, 2)
    fixed = (RecurrentDrafting(None, 2), RecurrentDrafting(4, 1), RecurrentDrafting(draft_len=5))
    drafts = []
    for method in (*fixed, RecurrentDrafting()):
        options = EngineOptions(folder, method)
        with OpenEngines(check_engines(options)).executor() as executor:
            assert run_all(executor, requests) == plain
            drafts.append(executor.get_speculation_stats().draft_tokens)
    assert min(drafts[:3]) > 100 and drafts[3] < min(drafts) + 1, "none that are unlikely"


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
    with opened(**options) as executor:
        assert run_all(executor, requests[:12]) == wanted


def test_cancelled_requests_leave_the_others_alone(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    with opened() as executor:
        for _ in range(3):
            cancel_some(executor, requests, plain, draw)


def test_the_cuda_host_drafts_from_a_head_too(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    """Over the fake device, which has the CPU's arithmetic."""
    assert accepted_by_host(engine, DRAFTING, requests, plain) > 100


def test_device_rounds_draft_from_a_head(
    engine: Path, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device, whose searches are the GPU's kernels in the interpreter: rounds alone,
    and rounds between steps that the host controls."""
    alone = never_need_the_host(requests)
    cases = (
        (RecurrentDrafting(), alone[:4]),
        (RecurrentDrafting(), [*alone, 14]),
        (RecurrentDrafting(None, 2), alone[:3]),
    )
    runs = list(rounds_on_device(engine, cases, requests, plain, monkeypatch))
    assert [run.stats.accepted_tokens > 8 and run.num_rounds > 1 for run in runs] == [True] * 3
    longest = (TREE_LEN // NUM_BEAMS, TREE_LEN // NUM_BEAMS, 2)
    for run, length in zip(runs, longest, strict=True):
        assert len(run.stats.accepted_at_position) <= length


def test_from_the_command_line(demo: DemoPair, engine: Path) -> None:
    """`run` with the engine's beams and with fewer, and what it refuses before weights."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*demo.program.command, "run", "--max_output_len", "24"]
        command += ["--input_text", "def read_lines(path):", *options]
        return subprocess.run(command, capture_output=True, text=True)

    folder = str(engine)
    texts = set()
    for options in (
        ("--redrafter_num_beams", "auto"),
        ("--redrafter-num-beams", "2", "--redrafter-draft-len-per-beam", "3"),
        ("--redrafter-draft-len-per-beam", "auto", "--draft-len", "4"),
    ):
        done = run("--engine_dir", folder, *options, "--verify-exact")
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())  # lines end where figures let them
        assert "tokens per round" in said and "exact: 24 tokens" in said
        texts.add(done.stdout)
    assert len(texts) == 1
    for options, found in (
        (("--redrafter-num-beams", "4"), "--redrafter-num-beams is 4; the engine was built for 3"),
        (
            ("--redrafter-num-beams", "auto", "--draft-len", "16"),
            "16 drafts per round are requested",
        ),
        (("--redrafter-num-beams", "auto", "--medusa-choices", "auto"), "one method drafts at a"),
        (("--medusa-choices", "auto"), "no Medusa heads"),
        (("--ngram-config", "[4,2,[0]]"), "cannot verify drafts"),
    ):
        done = run("--engine_dir", folder, *options)
        assert done.returncode in (1, 2) and found in done.stderr, done.stderr
    done = run("--engine_dir", str(demo.engine("target-fp8")), "--redrafter-num-beams", "auto")
    assert done.returncode == 1 and "no ReDrafter head" in done.stderr


def test_adaptive_lengths_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    with opened(adaptive_draft_len=True) as executor:
        assert run_all(executor, requests) == plain

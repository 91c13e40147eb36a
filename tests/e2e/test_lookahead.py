"""Lookahead decoding through the whole program: never another token than without."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.e2e import DemoPair, Outputs, cancel_some, run_all
from support.fake_device_runs import accepted_by_host, never_need_the_host, rounds_on_device

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

Opened = Callable[..., AbstractContextManager[Executor]]

SIZES = LookaheadDecodingConfig(5, 3, 5)
BUILT = LookaheadDecoding()  # the sizes that the engine was built with


@pytest.fixture(scope="module")
def engine(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookahead") / "engine"
    demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized("target"),
                "--output-dir", folder, "--max-batch-size", 16, "--max-seq-len", 1024,
                "--speculative_decoding_mode", "lookahead_decoding",
                "--lookahead_config", f"[{SIZES}]")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def opened(engine: Path) -> Opened:
    """opened(method, ...) -> a running executor of the engine."""

    @contextmanager
    def running(method: DraftMethod = BUILT, **options: Any) -> Iterator[Executor]:
        engines = EngineOptions(engine, method, **options)
        with OpenEngines(check_engines(engines)).executor() as executor:
            yield executor

    return running


@pytest.mark.parametrize("reuse", [False, True])
def test_a_window_changes_no_token(
    opened: Opened, requests: list[Request], plain: Outputs, reuse: bool
) -> None:
    """All together; prompts enter in chunks beside the trees of others, or from the cache."""
    options = {"enable_block_reuse": reuse, "max_num_tokens": 96}
    with opened(**options) as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:4]) == plain[:4], "again, from a warm cache"
        stats = executor.get_speculation_stats()
        assert not executor._worker._loop._drafter._states, "ended sequences are forgotten"
    assert stats.accepted_tokens > 10


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 3, 4), (4, 4, 0), (3, 2, 6)], ids=str)
def test_other_sizes_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs, sizes: tuple[int, int, int]
) -> None:
    with opened(LookaheadDecoding(LookaheadDecodingConfig(*sizes))) as executor:
        assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().draft_tokens > 50


def test_requests_with_windows_of_their_own_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    own = [None, LookaheadDecodingConfig(2, 3, 1), LookaheadDecodingConfig(1, 1, 0)]
    asked = [replace(r, lookahead_config=own[i % 3]) for i, r in enumerate(requests)]
    with opened() as executor:
        assert run_all(executor, asked) == plain
        executor.enqueue_request(replace(asked[0], lookahead_config=LookaheadDecodingConfig(6)))
        (response,) = executor.await_responses()
        assert isinstance(response.error, BadConfig)
    with opened(PlainDecoding()) as executor:
        assert run_all(executor, requests[:3]) == plain[:3]
        executor.enqueue_request(asked[1])
        (response,) = executor.await_responses()
        assert isinstance(response.error, Unsupported)


def test_any_engine_with_room_will_do(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    """Built for drafts from outside, and for Medusa heads."""
    for name, sizes in (("target-fp8", (2, 3, 0)), ("target-fp8-medusa", (3, 3, 4))):
        method = LookaheadDecoding(LookaheadDecodingConfig(*sizes))
        options = EngineOptions(demo.engine(name), method)
        with OpenEngines(check_engines(options)).executor() as executor:
            assert run_all(executor, requests[:12]) == plain[:12]
            assert executor.get_speculation_stats().draft_tokens > 20


def test_narrow_windows_of_attention_change_no_token(
    demo: DemoPair, opened: Opened, requests: list[Request]
) -> None:
    options = {"windows": WindowOptions((40,), 4), "enable_block_reuse": False}
    with demo.executor("target-fp8", **options) as executor:
        wanted = run_all(executor, requests[:12])
    with opened(**options) as executor:
        assert run_all(executor, requests[:12]) == wanted


def test_adaptive_lengths_change_no_token(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    with opened(adaptive_draft_len=True) as executor:
        assert run_all(executor, requests) == plain


def test_cancelled_requests_leave_the_others_alone(
    opened: Opened, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    with opened() as executor:
        for _ in range(3):
            cancel_some(executor, requests, plain, draw)


def test_the_cuda_host_looks_ahead_too(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    """Over the fake device, which has the CPU's arithmetic."""
    assert accepted_by_host(engine, BUILT, requests, plain) > 10


def test_device_rounds_look_ahead(
    engine: Path, requests: list[Request], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the fake device, whose windows are the GPU's kernel in the interpreter: rounds alone,
    and rounds between steps that the host controls."""
    alone = never_need_the_host(requests)
    smaller = LookaheadDecoding(LookaheadDecodingConfig(2, 3, 2))
    cases = (
        (LookaheadDecoding(), alone[:3]),
        (smaller, [*alone, 14]),
    )
    runs = list(rounds_on_device(engine, cases, requests, plain, monkeypatch))
    assert [run.stats.accepted_tokens > 3 and run.num_rounds > 3 for run in runs] == [True] * 2


def test_from_the_command_line(demo: DemoPair, engine: Path, tmp_path: Path) -> None:
    """`run` with the engine's sizes, with others and with a row's own, and what it refuses."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*demo.program.command, "run", "--max_output_len", "24", *options]
        return subprocess.run(command, capture_output=True, text=True)

    prompt, folder = "def read_lines(path):", str(engine)
    texts = set()
    for config in ("auto", "[2,3,2]", "[3,4,0]"):
        done = run("--engine_dir", folder, "--lookahead_config", config, "--verify-exact",
                   "--input_text", prompt)  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())  # lines end where figures let them
        assert "tokens per round" in said and "exact: 24 tokens" in said
        texts.add(done.stdout)
    assert len(texts) == 1
    rows = [{"prompt": prompt, "lookahead_config": sizes} for sizes in ([2, 2, 1], [9, 3, 1], [1])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("--engine_dir", folder, "--lookahead-config", "auto", "--input-file",
               str(tmp_path / "rows.jsonl"))  # fmt: skip
    assert done.returncode == 1 and f"[{SIZES}]" in done.stderr, done.stderr
    assert "Text 1: lookahead_config is [9,3,1]" in done.stderr
    assert "Text 2: lookahead_config is [1]" in done.stderr
    for options, found in (
        (("--lookahead-config", "[6,3,5]"), "is 21 drafts per round"),
        (("--lookahead-config", "[6,3]"), "it must have the form"),
        (("--lookahead-config", "auto", "--draft-len", "20"), "20 drafts per round are requested"),
        (("--lookahead-config", "auto", "--ngram-config", "[4,2,[0]]"), "one method drafts at a"),
    ):
        done = run("--engine_dir", folder, *options)
        assert done.returncode in (1, 2) and found in done.stderr, done.stderr
    done = run("--engine_dir", str(demo.engine("target-fp8")), "--lookahead-config", "auto")
    assert done.returncode == 1 and "built without --lookahead_config" in done.stderr


def test_an_engine_for_windows_is_not_one_for_drafts_from_outside(engine: Path) -> None:
    with pytest.raises(Exception, match="cannot verify drafts"):
        check_engines(EngineOptions(engine, NgramLookup(4, 2)))

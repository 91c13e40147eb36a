"""Lookahead decoding on a GPU: the tokens of plain decoding, alone, together and over reused
blocks, with trees of up to 119 drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.counted_rounds import CountedRounds
from support.e2e import Outputs, cancel_some, llmctl, run_all
from support.gpu import execute, quantize
from support.gpu_drafting import (
    opened,
    plain_texts,
    run_chosen,
    run_in_every_company,
    run_narrow_windows,
)
from support.lookahead_kernel import Rounds

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.request import OutputConfig, Request

PUBLISHED = LookaheadDecodingConfig(15, 5, 15)
BUILT = LookaheadDecoding()


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def engine(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, options = repository / "examples/demo-target", ["--dtype", request.param]
    if request.param == "fp8":
        checkpoint, options = quantize(checkpoint, folder / "checkpoint"), []
    llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", folder / "engine",
           "--backend", "cuda", "--max-batch-size", 16, "--max-seq-len", 1024,
           "--speculative_decoding_mode", "lookahead_decoding",
           "--lookahead_config", f"[{PUBLISHED}]", *options)  # fmt: skip
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine: Path, requests: list[Request]) -> Outputs:
    """Of each request alone, without drafts."""
    return plain_texts(engine, requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sizes", [[(15, 5, 15), (7, 5, 7)], [(3, 3, 2), (2, 2, 1), (3, 4, 0)], [(1, 2, 3)]], ids=str
)
def test_a_round_drafts_what_the_host_would(sizes: list[tuple[int, int, int]], seed: int) -> None:
    """Windows, pools and trees, after every round."""
    configs = [LookaheadDecodingConfig(*own) for own in sizes]
    most = max(config.max_draft_len for config in configs)
    num_rounds, accepted = Rounds(configs, seed, most, execute, "cuda").play(40)
    assert num_rounds > 8 and accepted > 0


def test_a_window_changes_no_token(
    engine: Path, requests: list[Request], plain: Outputs, rounds: CountedRounds
) -> None:
    stats = run_in_every_company(engine, BUILT, requests, plain)
    assert stats.accepted_tokens > 50
    assert rounds.total > 50 and rounds.ahead > 25, "the host was never behind"


def test_batches_that_never_need_the_host(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    run_chosen(engine, BUILT, requests, plain, device_requests)
    assert rounds.ahead > 10 and rounds.drafts == PUBLISHED.max_draft_len * rounds.total


def test_the_device_accepts_what_the_host_would(
    engine: Path, requests: list[Request], device_requests: list[int], rounds: CountedRounds
) -> None:
    """One by one: the trees are the same. Log-probabilities have the host lead every step."""
    counts = []
    for by_host in (False, True):
        output = OutputConfig(return_log_probs=by_host)
        before = rounds.total
        with opened(engine, BUILT, enable_block_reuse=False).executor() as executor:
            for index in device_requests:
                run_all(executor, [replace(requests[index], output_config=output)])
            stats = executor.get_speculation_stats()
        assert (rounds.total == before) == by_host
        counts.append((stats.rounds, stats.draft_tokens, stats.accepted_tokens))
    print(f"rounds, drafts and accepted ones: device {counts[0]}, host {counts[1]}")
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sizes", [(2, 2, 1), (7, 5, 7), (6, 3, 0), (1, 4, 9)], ids=str)
def test_other_sizes_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs, sizes: tuple[int, int, int]
) -> None:
    with opened(engine, LookaheadDecoding(LookaheadDecodingConfig(*sizes))).executor() as executor:
        for _ in range(2):
            assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().draft_tokens > 50


def test_windows_of_requests_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    own = [None, LookaheadDecodingConfig(4, 3, 4), LookaheadDecodingConfig(1, 1, 0)]
    asked = [replace(r, lookahead_config=own[i % 3]) for i, r in enumerate(requests)]
    with opened(engine, BUILT).executor() as executor:
        for _ in range(2):
            assert run_all(executor, asked) == plain


@pytest.mark.parametrize("reuse", [False, True])
def test_chunks_and_narrow_steps_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs, reuse: bool
) -> None:
    """Prompts enter in chunks beside the trees of others, or from the cache."""
    options = {"max_num_tokens": 250, "enable_block_reuse": reuse, "max_batch_size": 9}
    with opened(engine, BUILT, **options).executor() as executor:
        for _ in range(3):
            assert run_all(executor, requests) == plain


def test_narrow_windows_of_attention_change_no_token(engine: Path, requests: list[Request]) -> None:
    run_narrow_windows(engine, engine, BUILT, requests)


def test_lengths_that_adapt_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    with opened(engine, BUILT, adaptive_draft_len=True).executor() as executor:
        for _ in range(2):
            assert run_all(executor, requests) == plain


def test_cancelled_requests_leave_the_others_alone(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    draw = random.Random(1)
    with opened(engine, BUILT).executor() as executor:
        for _ in range(3):
            cancel_some(executor, requests, plain, draw)

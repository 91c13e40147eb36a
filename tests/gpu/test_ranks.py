"""All ranks of an engine in lockstep on one GPU: the same tokens alone, together and with drafts,
logits near those of one rank, and the planted text at 2, 4 and 8 ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.counted_rounds import CountedRounds
from support.e2e import DRAFT_LEN, Outputs, run_all
from support.gpu_drafting import opened, plain_texts, run_chosen, run_in_every_company
from support.gpu_ranks import SHARED_HEADS, TOGETHER, RankEngines

from llmctl.builder.engine_format import read_engine_config
from llmctl.errors import NoDevice
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.planted_text import planted_text
from llmctl.runtime.open import EngineOptions, check_engines
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig

WIDE_KINDS = [("fp8", 2), ("fp8", 4), ("fp8", 8), ("bfloat16", 4)]


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_drafts_of_one_rank_change_no_token(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    device_requests: list[int],
    rounds: CountedRounds,
    form: str,
    ranks: int,
) -> None:
    """The model itself drafts, on one rank: where ranks only round differently, it is mostly right.
    Rounds are led by the device, and between them steps by the host."""
    engine, method = (
        built.wide(form, ranks),
        DraftEngine(built.wide(form, 1), DRAFT_LEN),
    )
    stats = run_in_every_company(engine, method, requests, plain_together(engine), **TOGETHER)
    assert stats.accepted_tokens > 0.5 * stats.draft_tokens
    before = rounds.ahead
    run_chosen(engine, method, requests, plain_together(engine), device_requests, **TOGETHER)
    assert rounds.ahead > before + 10, "the device leads"


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_ngrams_change_no_token(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    form: str,
    ranks: int,
) -> None:
    engine = built.wide(form, ranks)
    method = NgramLookup(DRAFT_LEN, 3)
    stats = run_in_every_company(engine, method, requests, plain_together(engine), **TOGETHER)
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize(("form", "ranks"), WIDE_KINDS)
def test_log_probabilities_are_near_those_of_one_rank(
    built: RankEngines, ids: list[int], form: str, ranks: int
) -> None:
    """Of the first token behind prompts of all lengths: ranks round at other places."""
    asked = [
        Request(
            tuple(ids[53 * index : 53 * index + 1 + 11 * index]),
            1,
            SamplingConfig(),
            OutputConfig(return_log_probs=True),
        )
        for index in range(30)
    ]

    def log_probs(engine: Path, **options: bool) -> np.ndarray:
        with opened(engine, PlainDecoding(), **options).executor() as executor:
            found = []
            for request_id in executor.enqueue_requests(asked):
                (response,) = executor.await_responses(request_id)
                assert response.result is not None and response.result.log_probs is not None
                found.append(response.result.log_probs[0])
        return np.array(found)

    wanted = log_probs(built.wide(form, 1))
    found = log_probs(built.wide(form, ranks), **TOGETHER)
    print(f"{form}, {ranks} ranks: log-probabilities differ by {np.abs(found - wanted).max():.4f}")
    assert np.abs(wanted).min() > 0.1 and wanted.std() > 0.1, "the test would see it"
    assert np.abs(found - wanted).max() < (0.05 if form == "bfloat16" else 0.25)


@pytest.mark.parametrize("form", ["fp8", "bfloat16"])
def test_text_is_the_same_for_every_number_of_ranks(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    form: str,
) -> None:
    """Prompts by the kernel for many tokens, and verifications by those for few."""
    wanted = plain_texts(built.parted(form, 1), requests)
    for ranks in (2, 4, 8):
        assert plain_together(built.parted(form, ranks)) == wanted, ranks
    method = DraftEngine(built.parted(form, 1), DRAFT_LEN)
    stats = run_in_every_company(built.parted(form, 4), method, requests, wanted, **TOGETHER)
    assert stats.accepted_tokens > 0.5 * stats.draft_tokens, "the model itself drafts"


def test_a_draft_of_as_many_ranks_changes_no_token(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    rounds: CountedRounds,
) -> None:
    engine, method = built.demo("target"), DraftEngine(built.demo("draft"), DRAFT_LEN)
    stats = run_in_every_company(engine, method, requests, plain_together(engine), **TOGETHER)
    assert stats.accepted_tokens > 50 and rounds.ahead > 10


@pytest.mark.parametrize("mode", SHARED_HEADS)
def test_shares_of_heads_change_no_token(
    built: RankEngines,
    requests: list[Request],
    plain_together: Callable[[Path], Outputs],
    device_requests: list[int],
    rounds: CountedRounds,
    mode: str,
) -> None:
    """Each rank's rows of every product, gathered. Rounds are led by the device, and between them
    steps by the host."""
    method, options = SHARED_HEADS[mode]
    wanted, before = plain_together(built.demo("target")), rounds.ahead
    engine = built.headed(mode, *options)
    stats = run_in_every_company(engine, method, requests, wanted, **TOGETHER)
    assert stats.accepted_tokens > 50 and rounds.ahead > before + 10
    run_chosen(engine, method, requests, wanted, device_requests, **TOGETHER)


@pytest.mark.parametrize(
    ("ranks", "quantization"), [(2, "fp8"), (4, "fp8"), (8, "fp8"), (2, "w4a8_mxfp4_fp8")]
)
@pytest.mark.parametrize("is_drafted", [False, True])
def test_ranks_say_the_planted_text(
    built: RankEngines, ids: list[int], ranks: int, quantization: str, is_drafted: bool
) -> None:
    engine = built.planted("target", ranks, quantization)
    recipe = read_engine_config(engine).weights
    method = PlainDecoding()
    if is_drafted:
        method = DraftEngine(built.planted("draft", 1), DRAFT_LEN)
    first, stop = recipe["ordinary_tokens"]
    prompts = [tuple(ids[91 * index : 91 * index + 1 + 37 * index]) for index in range(16)]
    prompts = [prompt for prompt in prompts if first <= prompt[-1] < stop]
    asked = [Request(prompt, 40 + 3 * index) for index, prompt in enumerate(prompts)]
    wanted = [[tuple(planted_text(recipe, r.input_token_ids[-1], r.max_tokens))] for r in asked]
    with opened(engine, method, **TOGETHER).executor() as executor:
        assert run_all(executor, asked) == wanted
        assert [run_all(executor, [request])[0] for request in asked] == wanted
        stats = executor.get_speculation_stats()
    assert (stats.accepted_tokens > 100) == is_drafted


def test_more_ranks_than_gpus_are_refused_where_nobody_asked_for_one(
    built: RankEngines,
) -> None:
    options = EngineOptions(built.wide("fp8", 8))
    if torch.cuda.device_count() < 8:
        with pytest.raises(NoDevice, match="the engine has 8 ranks, which want a GPU each"):
            check_engines(options)
    check_engines(replace(options, ranks_on_one_device=True))


def test_run_says_how_many_ranks_there_are(built: RankEngines) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmctl.cli.entry", "run", "--engine-dir", built.demo("target"),
         "--draft-engine", built.demo("draft"), "--ranks-on-one-device", "--max-output-len", "20",
         "--input-text", "Once upon a time", "--verify-exact"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("backend cuda, 2 ranks on one device", "exact: "):
        assert words in done.stderr, done.stderr

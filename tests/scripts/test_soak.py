"""The soak: traffic that answers as alone passes, and another answer, a request that fails and an
executor that says nothing are told."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_pair import DRAFT_LEN, MAX_SEQ_LEN, VOCAB, build_pair

from llmctl.errors import LlmctlError
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.request import Request
from scripts.bench import soak, soak_traffic
from scripts.bench.soak_traffic import MOST_NEW, Texts, Traffic, make_requests, run_alone, run_for

Pair = tuple[object, object]
COUNT = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = np.random.default_rng(3)
    return make_requests(generator, (2, VOCAB), max(8, MAX_SEQ_LEN - MOST_NEW), COUNT)


@pytest.fixture(scope="module")
def wanted(pair: Pair, requests: list[Request]) -> list[Texts]:
    with Executor(pair[0], None, CONFIG, CpuSampling()) as executor:
        return run_alone(executor, requests)


CONFIG = ExecutorConfig(KvCacheConfig(4 * MAX_SEQ_LEN // 16))


def drafting(pair: Pair) -> Executor:
    return Executor(pair[0], DraftEngineDrafter(pair[1], DRAFT_LEN), CONFIG, CpuSampling())


def test_traffic_with_drafts_and_cancels_answers_as_alone(
    pair: Pair, requests: list[Request], wanted: list[Texts]
) -> None:
    with drafting(pair) as executor:
        totals = run_for(executor, requests, wanted, 2.0, np.random.default_rng(1), 8)
        assert executor.get_speculation_stats().accepted_tokens > 0
    assert totals.wrong == [] and totals.requests > 15 and 0 < totals.cancelled < totals.requests


def test_ranks_are_on_one_device_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"one": 1, "two": 2}

    def read(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(num_ranks=ranks[folder.name])

    monkeypatch.setattr(soak, "read_engine_config", read)
    given = argparse.Namespace(max_tokens=None, ranks_on_one_device=True)
    made = [soak.options_of(given, Path(name), PlainDecoding()) for name in ranks]
    assert [options.ranks_on_one_device for options in made] == [False, True]


@pytest.mark.parametrize("kind", range(5))
def test_another_answer_is_wrong(
    pair: Pair, requests: list[Request], wanted: list[Texts], kind: int
) -> None:
    """One token of a request of each kind."""
    (first, *rest) = wanted[kind]
    changed = ((first[0] ^ 1, *first[1:]), *rest)
    with drafting(pair) as executor:
        generator = np.random.default_rng(1)
        totals = run_for(executor, [requests[kind]], [changed], 0.5, generator, 4)
    assert totals.wrong and all(line.startswith("request 0 (") for line in totals.wrong)
    assert len(totals.wrong) >= totals.requests - totals.cancelled


def test_a_request_that_fails_and_an_executor_that_is_silent_end_the_soak(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Executor(pair[0], None, CONFIG, CpuSampling()) as executor:
        traffic = Traffic(executor)
        traffic.send(0, Request(tuple(range(2, MAX_SEQ_LEN + 9)), 4))
        with pytest.raises(LlmctlError):
            while True:
                traffic.receive()
        monkeypatch.setattr(soak_traffic, "STALL_S", 0.0)
        monkeypatch.setattr(executor, "await_responses", lambda timeout_s: [])
        with pytest.raises(TimeoutError, match="no response"):
            traffic.receive()

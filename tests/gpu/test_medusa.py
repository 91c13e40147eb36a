"""Medusa heads on a GPU: the tokens of plain decoding, alone, together and over reused blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.counted_rounds import CountedRounds
from support.e2e import TREE_LEN, Outputs, cancel_some, llmctl, run_all
from support.gpu import quantize
from support.gpu_drafting import opened, plain_texts, run_chosen, run_in_every_company
from support.medusa import fit_heads, save_heads
from transformers import AutoModelForCausalLM

from llmctl.builder.heads.medusa.tree import parse_choices
from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.request import Request

NUM_HEADS = 4


@pytest.fixture(scope="module")
def heads(repository: Path, ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know a little of the held-out text."""
    checkpoint = repository / "examples/demo-target"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return save_heads(
        tmp_path_factory.mktemp("heads"), fit_heads(model, ids[:4096], NUM_HEADS, 4096)
    )


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def engine(
    request: pytest.FixtureRequest,
    heads: Path,
    repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "engine"
    checkpoint = repository / "examples/demo-target"
    options: list[object] = ["--dtype", request.param]
    if request.param == "fp8":
        checkpoint, options = quantize(checkpoint, folder.parent / "checkpoint"), []
    options += ["--max-batch-size", 16, "--max-seq-len", 1024, "--backend", "cuda"]
    llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", folder,
           "--speculative-decoding-mode", "medusa", "--draft-model-dir", heads,
           "--max-draft-len", TREE_LEN, *options)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def plain(engine: Path, requests: list[Request]) -> Outputs:
    """Of each request alone, without drafts."""
    return plain_texts(engine, requests)


def test_heads_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs, rounds: CountedRounds
) -> None:
    """Rounds on the device, and between them steps of the host: prompts, penalties, own lengths."""
    stats = run_in_every_company(engine, Medusa(), requests, plain)
    assert stats.accepted_tokens > 100
    assert len(stats.accepted_at_position) >= 3, "paths of several tokens are accepted"
    assert rounds.total > 100 and rounds.ahead > 50, "the host was never behind"


def test_batches_that_never_need_the_host(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    run_chosen(engine, Medusa(), requests, plain, device_requests, max_num_tokens=300)
    assert rounds.ahead > 30 and rounds.drafts == TREE_LEN * rounds.total


@pytest.mark.parametrize(
    "choices",
    ["[[0, 0, 0, 0]]", "[[0]]", "[[0], [1], [2], [3], [4], [5]]", "[[0, 0], [1, 0, 1], [0, 1, 0]]"],
)
def test_other_trees_change_no_token(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    choices: str,
    rounds: CountedRounds,
) -> None:
    """A chain, a star, a few nodes of an odd number."""
    asked = [requests[index] for index in device_requests]
    with opened(engine, Medusa(parse_choices(choices))).executor() as executor:
        assert run_all(executor, requests) == plain
        assert run_all(executor, asked) == [plain[index] for index in device_requests]
    assert rounds.total > 10


def test_lengths_that_adapt_change_no_token(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    run_chosen(engine, Medusa(), requests, plain, device_requests, adaptive_draft_len=True)
    assert rounds.total > 50


def test_the_device_accepts_what_the_host_would(
    engine: Path, requests: list[Request], device_requests: list[int], rounds: CountedRounds
) -> None:
    """One by one: but for the last few tokens of a sequence the trees are the same."""
    asked = [requests[index] for index in device_requests]
    lengths = []
    for method in (Medusa(), Medusa(accuracy=HeadAccuracy())):  # the latter has the host count
        before = rounds.total
        with opened(engine, method).executor() as executor:
            for request in asked:
                run_all(executor, [request])
            stats = executor.get_speculation_stats()
        assert (rounds.total > before) == method.is_device_led
        lengths.append(1 + stats.accepted_tokens / stats.rounds)
    print(f"tokens a round: device {lengths[0]:.3f}, host {lengths[1]:.3f}")
    assert abs(lengths[0] / lengths[1] - 1) < 0.08


def test_cancelled_requests_leave_the_others_alone(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    """All of them, and those alone that never need the host."""
    draw = random.Random(1)
    with opened(engine, Medusa()).executor() as executor:
        for chosen in (range(len(requests)), device_requests) * 3:
            own = [requests[index] for index in chosen]
            cancel_some(executor, own, [plain[index] for index in chosen], draw)
    assert rounds.total > 20

"""Trees from a draft engine on a GPU: the tokens of plain decoding, and drafts worth having.

The text has run on an H100; that drafts are those of the host to the end of a text has not yet."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.counted_rounds import CountedRounds
from support.e2e import KINDS, Outputs, cancel_some, llmctl, run_all
from support.gpu import quantize
from support.gpu_drafting import (
    lengths_of_device_and_host,
    opened,
    plain_texts,
    run_chosen,
    run_in_every_company,
    run_narrow_windows,
)

from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.request import Request

MOST = 16  # drafts that every engine here has room for
TREES = (DraftTree(4, 3, 12), DraftTree(6, 2, 16), DraftTree(1, 4, 4), DraftTree(6, 2, 12, 1))


@dataclass(frozen=True)
class Pair:
    """Both engines, and one of the target without drafts."""

    target: Path
    draft: Path
    bare: Path


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def pair(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    for name, role in (("target", "target"), ("draft", "draft"), ("bare", "target")):
        checkpoint, options = repository / f"examples/demo-{role}", ["--dtype", request.param]
        if request.param == "fp8":
            made = folder / f"{role}-checkpoint"
            checkpoint = made if made.exists() else quantize(checkpoint, made)
            options = []
        drafts = [] if name == "bare" else ["--max-draft-len", MOST]
        llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", folder / name,
               "--backend", "cuda", "--max-batch-size", 16, "--max-seq-len", 1024, *options,
               *drafts)  # fmt: skip
    return Pair(folder / "target", folder / "draft", folder / "bare")


@pytest.fixture(scope="module")
def plain(pair: Pair, requests: list[Request]) -> Outputs:
    """Of each request alone, without drafts."""
    return plain_texts(pair.bare, requests)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees_change_no_token(
    pair: Pair, requests: list[Request], plain: Outputs, tree: DraftTree, rounds: CountedRounds
) -> None:
    """Rounds on the device, and between them steps of the host: prompts, penalties, own lengths.
    Requests that are sampled draft chains beside the trees."""
    method = DraftEngine(pair.draft, tree=tree)
    stats = run_in_every_company(pair.target, method, requests, plain)
    assert stats.accepted_tokens > 100 and len(stats.accepted_at_position) == tree.depth
    print(f"rounds on the device: {rounds.total}, ahead of the host: {rounds.ahead}")
    assert rounds.total > 60 and rounds.ahead > 30, "the host was never behind"
    options = {"max_num_tokens": 200, "max_batch_size": 9}
    with opened(pair.target, method, **options).executor() as executor:
        assert run_all(executor, requests) == plain, "in narrow steps"
        cancel_some(executor, requests, plain, random.Random(2))


def test_batches_that_never_need_the_host(
    pair: Pair,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    """And the same with lengths that adapt, rounds without drafts among them."""
    method, asked = DraftEngine(pair.draft, tree=TREES[0]), (requests, plain, device_requests)
    run_chosen(pair.target, method, *asked, max_num_tokens=300)
    assert rounds.ahead > 30 and rounds.drafts == TREES[0].nodes * rounds.total
    run_chosen(pair.target, method, *asked, adaptive_draft_len=True)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_device_accepts_what_the_host_would(
    pair: Pair,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    tree: DraftTree,
    rounds: CountedRounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the ends of the texts."""
    method = DraftEngine(pair.draft, tree=tree)
    asked = requests, plain, device_requests, rounds, monkeypatch
    device, host = lengths_of_device_and_host(pair.target, method, *asked)
    assert abs(device / host - 1) < 0.01


def test_narrow_windows_change_no_token(pair: Pair, requests: list[Request]) -> None:
    run_narrow_windows(pair.bare, pair.target, DraftEngine(pair.draft, tree=TREES[0]), requests)


def test_the_target_as_its_own_draft_finds_nearly_every_token(
    pair: Pair, requests: list[Request]
) -> None:
    """With the same bits along a path; keys of another would end it early. The text goes on past
    what a round could accept by chance."""
    greedy = [
        replace(requests[index], max_draft_len=None, max_tokens=60, end_id=None)
        for index in range(0, 32, len(KINDS))
    ]
    with opened(pair.target, DraftEngine(pair.target, tree=DraftTree(4, 3, 16))).executor() as own:
        run_all(own, greedy)
        stats = own.get_speculation_stats()
    length = 1 + stats.accepted_tokens / stats.rounds
    print(f"tokens a round of the target as its own draft: {length:.3f} of 5")
    assert length > 4.6

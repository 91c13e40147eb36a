"""Tests that need a GPU of a compute capability that llmctl has kernels for; what those of heads
share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.counted_rounds import CountedRounds
from support.e2e import KINDS, Outputs
from support.gpu_drafting import plain_texts
from support.gpu_ranks import TOGETHER, RankEngines

from llmctl.runtime.request import Request

CAPABILITY = (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here, with the reason, where there is no such GPU."""
    if not torch.cuda.is_available():
        reason = "needs a GPU"
    elif torch.cuda.get_device_capability() != CAPABILITY:
        reason = f"needs compute capability 9.0, not {torch.cuda.get_device_capability()}"
    else:
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ids(repository: Path) -> list[int]:
    """The held-out text as token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def requests(ids: list[int]) -> list[Request]:
    """For engines with heads: greedy, seeded and penalized, with and without drafts, 32 for 16
    places."""
    lengths = (1, 31, 33, 150, 64, 5)
    return [
        Request(
            tuple(ids[97 * index : 97 * index + lengths[index % len(lengths)]]),
            5 + 7 * index % 60,
            KINDS[index % len(KINDS)],
            end_id=1,
            max_draft_len=(None, None, 0, 3)[index // 3 % 4],
        )
        for index in range(32)
    ]


@pytest.fixture(scope="session")
def device_requests(requests: list[Request]) -> list[int]:
    """Those of `requests` that never need the host."""
    return [
        index
        for index, request in enumerate(requests)
        if index % len(KINDS) != 2 and request.max_draft_len is None
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> RankEngines:
    """Those of several ranks."""
    return RankEngines(tmp_path_factory.mktemp("engines"), repository / "examples")


@pytest.fixture(scope="module")
def plain_together(requests: list[Request]) -> Callable[[Path], Outputs]:
    """Of each request alone, without drafts, with all ranks on one GPU."""
    known: dict[Path, Outputs] = {}

    def texts(engine: Path) -> Outputs:
        if engine not in known:
            known[engine] = plain_texts(engine, requests, **TOGETHER)
        return known[engine]

    return texts


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> CountedRounds:
    """Counts those of the test."""
    return CountedRounds(monkeypatch)

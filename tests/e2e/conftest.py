"""The demo pair, quantized and built once for all end-to-end tests, through the real program."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.e2e import KINDS, DemoPair, Outputs, PromptMaker, run_all
from support.forked_program import ForkedProgram
from support.rank_runs import Ranks

from llmctl.runtime.request import OutputConfig, Request


@pytest.fixture(scope="session")
def demo(
    tmp_path_factory: pytest.TempPathFactory, repository: Path, forked_program: ForkedProgram
) -> DemoPair:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share what one of them has made
        folder = folder.parent
    (folder / "demo-pair").mkdir(exist_ok=True)
    return DemoPair(folder / "demo-pair", repository / "examples", forked_program)


@pytest.fixture
def ranks(demo: DemoPair) -> Iterator[Ranks]:
    """Runs of the demo target on two ranks, of which nothing may stay behind."""
    shared = set(os.listdir("/dev/shm"))
    made = Ranks(demo.engine("target-fp8-tp2"), demo.program.command, [])
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "llmctl" in name]


@pytest.fixture(scope="session")
def held_out_ids(repository: Path) -> list[int]:
    """The held-out text as token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def prompts(held_out_ids: list[int]) -> PromptMaker:
    """`prompts(n)`: n prompts of 1 to 150 tokens from random places of the held-out text."""

    def make(count: int) -> list[tuple[int, ...]]:
        rng = random.Random(count)
        made = []
        for _ in range(count):
            length = rng.choice((1, 2, 31, 32, 33, rng.randint(3, 150)))
            start = rng.randrange(len(held_out_ids) - length)
            made.append(tuple(held_out_ids[start : start + length]))
        return made

    return make


@pytest.fixture(scope="session")
def requests(prompts: PromptMaker) -> list[Request]:
    """For engines with heads: greedy and seeded, with and without drafts, of all lengths; 18 for 16
    places."""
    return [
        Request(
            prompt,
            4 + 3 * (index % 13),
            KINDS[index % len(KINDS)],
            OutputConfig(return_log_probs=index % 5 == 0),
            end_id=1,
            max_draft_len=(None, None, 0, 3, 7)[index // 3 % 5],
        )
        for index, prompt in enumerate(prompts(24)[:18])
    ]


@pytest.fixture(scope="session")
def plain(demo: DemoPair, requests: list[Request]) -> Outputs:
    """Theirs of the engine without a head, each request alone."""
    with demo.executor("target-fp8", enable_block_reuse=False) as executor:
        return [run_all(executor, [request])[0] for request in requests]

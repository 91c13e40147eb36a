"""Targets of two ranks with draft heads, which rank 0 runs: the text of one rank without heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.e2e import DemoPair, Outputs, run_all

from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request

METHODS: dict[str, DraftMethod] = {  # that draft as much as asked for, whatever it costs
    "medusa": Medusa(draft_len=15),
    "redrafter": RecurrentDrafting(None, 3),
    "eagle": Eagle(4),
}
OPTIONS = {
    "medusa": (),
    "redrafter": ("--redrafter-num-beams", 3, "--redrafter-draft-len-per-beam", 3),
    "eagle": ("--max-draft-len", 4),
}
Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def build(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The demo target in two ranks with its heads of a mode, or on one without."""
    folder = tmp_path_factory.mktemp("rank-heads")

    def made(mode: str) -> Path:
        engine = folder / (mode or "plain")
        words: list[object] = ["--max-draft-len", 4]
        if mode:
            words = ["--speculative-decoding-mode", mode, "--tp-size", 2, *OPTIONS[mode],
                     "--draft-model-dir", demo.examples / f"demo-{mode}"]  # fmt: skip
        if not engine.exists():
            demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir",
                        demo.examples / "demo-target", "--tp-invariant", "--output-dir", engine,
                        "--max-batch-size", 16, "--max-seq-len", 1024, *words)  # fmt: skip
        return engine

    return made


def texts(engine: Path, method: DraftMethod, requests: list[Request]) -> tuple[Outputs, int]:
    """(what they answer, together; accepted drafts)."""
    engines = OpenEngines(check_engines(EngineOptions(engine, method, max_num_tokens=256)))
    try:
        with engines.executor() as executor:
            found = run_all(executor, requests)
            assert run_all(executor, requests[:6]) == found[:6], "again, from a warm cache"
            return found, executor.get_speculation_stats().accepted_tokens
    finally:
        engines.close()


@pytest.fixture(scope="module")
def wanted(build: Build, requests: list[Request]) -> Outputs:
    return texts(build(""), PlainDecoding(), requests)[0]


@pytest.mark.parametrize("mode", METHODS)
def test_heads_beside_two_ranks_change_no_token(
    build: Build, requests: list[Request], wanted: Outputs, mode: str
) -> None:
    """Greedy, seeded and penalized, together; of engines with one text for every number of
    ranks."""
    found, accepted = texts(build(mode), METHODS[mode], requests)
    assert found == wanted and accepted > 100


@pytest.mark.parametrize("mode", METHODS)
def test_every_rank_has_the_heads_whole(build: Build, mode: str) -> None:
    """The same bytes on both, also of what the base graph has a share of."""
    (plan, first), (other, second) = (open_with_tables(build(mode), rank) for rank in range(2))
    assert plan == other and plan.heads
    for graph in plan.heads.values():
        assert not any("ranks" in op.attributes for op in graph.ops)
        for op in graph.ops:
            for name in set(op.inputs.values()) & set(first):
                assert torch.equal(first[name], second[name]), name

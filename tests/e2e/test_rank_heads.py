"""Targets of two ranks with draft heads, which both compute: the text of one rank without heads,
and the drafts of one rank with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.e2e import DemoPair, Outputs, run_all

from llmctl.plugins.core.shares import is_share
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
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The demo target in so many ranks with its heads of a mode, or without."""
    folder = tmp_path_factory.mktemp("rank-heads")

    def made(mode: str, ranks: int = 2) -> Path:
        engine = folder / f"{mode}-{ranks}"
        words: list[object] = ["--max-draft-len", 4]
        if mode:
            words = ["--speculative-decoding-mode", mode, "--tp-size", ranks, *OPTIONS[mode],
                     "--draft-model-dir", demo.examples / f"demo-{mode}"]  # fmt: skip
        if not engine.exists():
            demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir",
                        demo.examples / "demo-target", "--tp-invariant", "--output-dir", engine,
                        "--max-batch-size", 16, "--max-seq-len", 1024, *words)  # fmt: skip
        return engine

    return made


def texts(
    engine: Path, method: DraftMethod, requests: list[Request]
) -> tuple[Outputs, tuple[int, int]]:
    """(what they answer, together; drafts and accepted ones, of each request alone)."""
    engines = OpenEngines(check_engines(EngineOptions(engine, method, max_num_tokens=256)))
    try:
        with engines.executor() as executor:
            found = run_all(executor, requests)
            before = executor.get_speculation_stats()
            alone = [run_all(executor, [request])[0] for request in requests[:12]]
            assert alone == found[:12], "again, from a warm cache"
            stats = executor.get_speculation_stats()
    finally:
        engines.close()
    drafts = stats.draft_tokens - before.draft_tokens
    return found, (drafts, stats.accepted_tokens - before.accepted_tokens)


@pytest.fixture(scope="module")
def wanted(build: Build, requests: list[Request]) -> Outputs:
    return texts(build("", 1), PlainDecoding(), requests)[0]


@pytest.mark.parametrize("mode", METHODS)
def test_heads_beside_two_ranks_draft_as_on_one_and_change_no_token(
    build: Build, requests: list[Request], wanted: Outputs, mode: str
) -> None:
    """Greedy, seeded and penalized, together; of engines with one text for every number of ranks,
    whose hidden rows, and so drafts, are the same, too."""
    one = texts(build(mode, 1), METHODS[mode], requests)
    assert one[0] == wanted and one[1][1] > 40
    assert texts(build(mode), METHODS[mode], requests) == one


@pytest.mark.parametrize("mode", METHODS)
def test_ranks_have_rows_of_heads_that_do_not_attend(build: Build, mode: str) -> None:
    """Side by side they are those of one rank; what is no product, and EAGLE's head, is whole on
    both."""
    whole, wanted = open_with_tables(build(mode, 1))
    (plan, first), (other, second) = (open_with_tables(build(mode), rank) for rank in range(2))
    assert plan == other and plan.heads
    for name, graph in plan.heads.items():
        products = {op.name: op for op in whole.heads[name].ops}
        assert graph.is_over_ranks == (mode != "eagle")
        for op in graph.ops:
            for role, tensor in op.inputs.items():
                if tensor not in first:
                    continue
                parts = [own[tensor].view(torch.uint8) for own in (first, second)]
                if is_share(op.outputs.get("out", "")):
                    one = wanted[products[op.name].inputs[role]].view(torch.uint8)
                    found = torch.cat(parts)
                    assert torch.equal(found[: len(one)], one) and not found[len(one) :].any()
                else:
                    assert torch.equal(*parts), tensor


@pytest.mark.parametrize("mode", ["medusa", "redrafter"])
def test_a_rank_that_did_not_get_its_share_would_draft_otherwise(build: Build, mode: str) -> None:
    """Ranks differ in what they have of every product: the tests above would see it."""
    plan, first = open_with_tables(build(mode), 0)
    _, second = open_with_tables(build(mode), 1)
    shared = [
        op.inputs["weight"]
        for graph in plan.heads.values()
        for op in graph.ops
        if is_share(op.outputs.get("out", "")) and "weight" in op.inputs
    ]
    assert len(set(shared)) >= 4
    assert not any(torch.equal(first[name], second[name]) for name in shared)

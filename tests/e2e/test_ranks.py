"""Engines of several ranks through the whole runtime: with drafts, in batches, in chunks, from a
warm cache, the text is that of plain decoding alone; and the same for every number of ranks where
the engine was built for that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.e2e import DRAFT_LEN, KINDS, DemoPair, Outputs, PromptMaker, cancel_some, run_all

from llmctl.errors import RankFailure
from llmctl.plugins.core.calls import StepInputs, Trees
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.kv_cache import BlockCopy, CopyKind
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.ranks import follower
from llmctl.runtime.ranks.commands import Command, decode, encode
from llmctl.runtime.request import Request

pytestmark = pytest.mark.usefixtures("forked_ranks")
NUM_PROMPTS = 20


@contextmanager
def opened(demo: DemoPair, target: str, draft: str = "", **options: Any) -> Iterator[OpenEngines]:
    """Engines whose other ranks end with the block."""
    method: DraftMethod = PlainDecoding()
    if draft == "ngram":
        method = NgramLookup(DRAFT_LEN, 3)
    elif draft:
        tree = DraftTree(3, 2, DRAFT_LEN) if draft == target else None
        method = DraftEngine(demo.engine(draft), DRAFT_LEN, tree=tree)
    engines = OpenEngines(check_engines(EngineOptions(demo.engine(target), method, **options)))
    try:
        yield engines
    finally:
        engines.close()


@contextmanager
def running(demo: DemoPair, *names: str, **options: Any) -> Iterator[Executor]:
    with opened(demo, *names, **options) as engines, engines.executor() as executor:
        yield executor


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    rng = random.Random(7)
    return [
        Request(prompt, rng.randint(1, 20), KINDS[index % len(KINDS)], end_id=1)
        for index, prompt in enumerate(prompts(NUM_PROMPTS))
    ]


@pytest.fixture(scope="module")
def alone(demo: DemoPair, requests: list[Request]) -> Outputs:
    """The reference: two ranks, one request at a time, no draft, no reuse."""
    with running(demo, "target-fp8-tp2", enable_block_reuse=False) as executor:
        return [run_all(executor, [request])[0] for request in requests]


@pytest.mark.parametrize("draft", ["", "draft-fp8", "draft-fp8-tp2", "target-fp8-tp2", "ngram"])
def test_batches_and_drafts_change_no_token(
    demo: DemoPair, requests: list[Request], alone: Outputs, draft: str
) -> None:
    """The draft engine has one rank, which drafts in rank 0, or two; the target as its own draft
    drafts trees."""
    with running(demo, "target-fp8-tp2", draft) as executor:
        assert run_all(executor, requests) == alone
        accepted = executor.get_speculation_stats().accepted_tokens
        cancel_some(executor, requests, alone, random.Random(1))
        assert run_all(executor, requests) == alone  # from the blocks of the first time
    assert (accepted > 0) == bool(draft)


def test_chunks_and_blocks_that_left_and_came_back_change_no_token(
    demo: DemoPair, requests: list[Request], alone: Outputs
) -> None:
    """Steps of 40 tokens, a cache that does not hold all, and a host tier for the rest."""
    options = {"max_num_tokens": 40, "max_tokens": 512, "host_memory_bytes": 1 << 24}
    with running(demo, "target-fp8-tp2", "draft-fp8-tp2", **options) as executor:
        assert run_all(executor, requests) == alone
        assert run_all(executor, requests[::-1]) == alone[::-1]
        stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert stats.onboarded_blocks > 0


def test_an_engine_built_for_every_number_of_ranks_has_one_text(
    demo: DemoPair, requests: list[Request]
) -> None:
    with demo.executor("target-fp8-invariant") as executor:
        wanted = run_all(executor, requests)
    with running(demo, "target-fp8-tp2-invariant", "ngram") as executor:
        assert run_all(executor, requests) == wanted


def test_numbers_are_those_of_all_ranks_together(demo: DemoPair) -> None:
    with opened(demo, "target-fp8") as engines, opened(demo, "target-fp8-tp2") as ranks:
        both = (engines.target.kv_bytes_per_block, ranks.target.kv_bytes_per_block)
        assert both[0] == both[1], "two KV heads, one on each rank"
        assert ranks.target.weight_bytes > engines.target.weight_bytes  # embedding and norms twice
        assert "on each of 2 ranks" in ranks.opened.facts(ranks.target)


def test_commands_survive_the_way_to_another_rank() -> None:
    step = StepInputs(
        **{
            name: np.arange(count, dtype=np.int32)
            for name, count in (
                *(("token_ids", 5), ("position_ids", 5), ("cu_q", 3), ("kv_len", 2)),
                *(("slot_mapping", 5), ("logit_rows", 0)),
            )
        },
        block_tables=np.arange(6, dtype=np.int32).reshape(2, 3),
        trees=Trees(np.array([-1, 0], np.int32), np.arange(8, dtype=np.int32).reshape(4, 2)),
    )
    copies = [BlockCopy(1, 2, 30, CopyKind.OFFLOAD, 3), BlockCopy(4, 5, 6)]
    moves = [[(1, np.int32(2)), (3, 4)], []]
    roots = np.array([5, 7], np.int32)
    begun = replace(step, trees=Trees(step.trees.start, step.trees.paths, roots))
    calls = [
        ("run", step),
        ("run", begun),
        ("run", replace(step, best_only=True)),
        ("run", replace(step, trees=None, context_end=np.array([0, 512], np.int32))),
        ("feed", replace(begun, context_end=np.array([256, 0], np.int32))),
        ("copy_blocks", copies),
        ("compact", moves),
        ("allocate_kv_cache", 9),
    ]
    for call, argument in calls:
        data = encode(Command("target", call, argument))
        parts = [data]

        def read(count: int, parts: list[bytes] = parts) -> bytes:
            taken, parts[0] = parts[0][:count], parts[0][count:]
            return taken

        found = decode(read)
        assert (found.engine, found.call, parts[0]) == ("target", call, b"")
        if call not in ("run", "feed"):
            assert found.argument == argument
            continue
        for name in (*StepInputs.__dataclass_fields__,):
            if name != "trees":
                assert np.array_equal(getattr(found.argument, name), getattr(argument, name)), name
        for name in ("start", "paths", "roots"):
            kept = getattr(argument.trees, name, None)
            assert np.array_equal(getattr(found.argument.trees, name, None), kept), name


def test_a_rank_freezes_what_it_has_before_it_takes_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full garbage collection of one rank takes the others' time as well."""
    calls: list[str] = []
    monkeypatch.setattr(follower.freezing, "freeze", lambda: calls.append("freeze"))

    def read(count: int) -> bytes:
        calls.append("read")
        raise RankFailure("rank 0 has ended")

    ranks, channel = SimpleNamespace(read=read), SimpleNamespace()
    with pytest.raises(RankFailure):
        follower._execute(cast(Any, channel), cast(Any, ranks), {})
    assert calls == ["freeze", "read"]

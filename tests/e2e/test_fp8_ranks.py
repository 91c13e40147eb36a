"""Two ranks whose attention has FP8 products, in lockstep with the CPU's arithmetic: they say what
one rank says, where engines are built for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fp8_context import Said, make_requests, say
from support.fp8_executor import NGRAM, TwoKinds, build_small, executor_of
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens

Alone = dict[Fp8Tokens, list[Said]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Engines of one model, by ranks."""
    root = tmp_path_factory.mktemp("fp8_ranks")
    return {
        ranks: build_small(root / str(ranks), tp_size=ranks, tp_invariant=True) for ranks in (1, 2)
    }


@pytest.fixture(scope="module")
def alone(folders: dict[int, Path]) -> Alone:
    """What one rank says, each prompt read whole and by itself."""
    found = {}
    for products in Fp8Tokens:
        with executor_of(folders[1], products, reuse=False) as executor:
            found[products] = [say(executor, [request])[0] for request in make_requests()]
    return found


@pytest.mark.parametrize("draft", [None, NGRAM, Fp8Tokens.ALL])
@pytest.mark.parametrize("products", [Fp8Tokens.PROMPTS, Fp8Tokens.ALL])
def test_two_ranks_say_what_one_says(
    folders: dict[int, Path], alone: Alone, products: Fp8Tokens, draft: Fp8Tokens | str | None
) -> None:
    TwoKinds.num_fp8 = 0
    with executor_of(folders[2], products, draft=draft, max_num_tokens=300) as executor:
        assert say(executor, make_requests()) == alone[products]
        accepted = executor._worker._loop.stats.accepted_tokens
    assert TwoKinds.num_fp8 > 0 and (accepted > 0) == (draft is not None)
    others = [said for kind, said in alone.items() if kind is not products]
    assert all(said != alone[products] for said in others), "equal bits would say nothing"


def test_rounds_of_two_ranks_say_the_same(
    folders: dict[int, Path], alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_rounds_by_reference(monkeypatch)
    wanted = [tokens for tokens, _ in alone[Fp8Tokens.ALL]]
    with executor_of(folders[2], Fp8Tokens.ALL, draft=Fp8Tokens.ALL, in_rounds=True) as executor:
        found = say(executor, make_requests(with_log_probs=False))
        assert [tokens for tokens, _ in found] == wanted
        assert executor._worker._loop.stats.accepted_tokens > 0

"""Engines and trees that do not go together are named by their config.json alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmctl.builder.heads.medusa.tree import DEFAULT, MedusaTree
from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.medusa.engine_check import built_tree
from llmctl.runtime.drafting.medusa.method import Medusa

CHOICES = [[0], [0, 0], [1]]


def engine(mode: int = 4, max_draft_len: int = 5, **heads: object) -> SimpleNamespace:
    facts = {"num_heads": 2, "num_layers": 1, "choices": CHOICES, **heads}
    build = {"speculative_decoding_mode": mode, "max_draft_len": max_draft_len}
    return SimpleNamespace(build_config={**build, "draft_heads": facts})


def test_the_length_is_that_of_the_tree_unless_less_is_asked_for():
    assert Medusa().check(engine(), {}) == 3
    assert Medusa(draft_len=2).check(engine(), {}) == 2
    assert Medusa(draft_len=5).check(engine(), {}) == 3, "there are no more nodes"
    assert Medusa(MedusaTree.of([(0, 1), (2, 3)])).check(engine(), {}) == 4
    assert Medusa(MedusaTree(DEFAULT).of_depth(2), 5).check(engine(), {}) == 5
    assert built_tree(engine()) == MedusaTree(((0,), (0, 0), (1,)))


@pytest.mark.parametrize(
    ("method", "target", "found", "fix"),
    [
        (Medusa(), engine(2), "no Medusa heads", "--draft_model_dir HEADS"),
        (Medusa(MedusaTree.of([(0, 0, 0)])), engine(), "a path of 3 tokens; the engine has 2", "2"),
        (
            Medusa(MedusaTree(DEFAULT).of_depth(2)),
            engine(),
            "38 drafts per round are requested; the engine was built for max_draft_len 5",
            "--draft-len 5",
        ),
        (Medusa(draft_len=6), engine(), "6 drafts per round", "--max_draft_len 6"),
    ],
)
def test_what_does_not_fit_is_refused(method, target, found, fix):
    with pytest.raises(PairMismatch, match=found) as error:
        method.check(target, {})
    assert fix in error.value.fix


def test_an_engine_that_lost_its_facts_is_refused():
    target = engine()
    del target.build_config["draft_heads"]
    with pytest.raises(CorruptEngine, match="nothing of its Medusa heads"):
        Medusa().check(target, {})

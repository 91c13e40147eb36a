"""Engines and beams that do not go together are named by their config.json alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.redrafter.drafter import BeamShape
from llmctl.runtime.drafting.redrafter.engine_check import beam_shape
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting


def engine(mode: int = 16, beams: int = 3, length: int = 4) -> SimpleNamespace:
    facts = {"num_beams": beams, "draft_len_per_beam": length, "greedy_search": True}
    build = {"speculative_decoding_mode": mode, "max_draft_len": beams * length}
    return SimpleNamespace(build_config={**build, "draft_heads": facts})


def test_the_length_is_that_of_the_beams_unless_less_is_asked_for():
    assert RecurrentDrafting().check(engine(), {}) == 12
    assert RecurrentDrafting(draft_len=5).check(engine(), {}) == 5
    assert RecurrentDrafting(2).check(engine(), {}) == 8
    assert RecurrentDrafting(None, 1).check(engine(), {}) == 3
    assert RecurrentDrafting(3, 4, 12).check(engine(), {}) == 12
    assert beam_shape(engine(), 2, None) == BeamShape(2, 4, for_greedy=True)


@pytest.mark.parametrize(
    ("method", "target", "found", "fix"),
    [
        (RecurrentDrafting(), engine(2), "no ReDrafter head", "--draft_model_dir HEAD"),
        (RecurrentDrafting(4), engine(), "--redrafter-num-beams is 4; .* built for 3", "beams 3"),
        (RecurrentDrafting(3, 5), engine(), "len-per-beam is 5; .* built for 4", "rebuild it with"),
        (RecurrentDrafting(2, 2, 5), engine(), "5 drafts per round are requested; .* 4", "len 4"),
    ],
)
def test_what_does_not_fit_is_refused(method, target, found, fix):
    with pytest.raises(PairMismatch, match=found) as error:
        method.check(target, {})
    assert fix in error.value.fix


def test_an_engine_that_lost_its_facts_is_refused():
    target = engine()
    del target.build_config["draft_heads"]
    with pytest.raises(CorruptEngine, match="nothing of its ReDrafter head"):
        RecurrentDrafting().check(target, {})

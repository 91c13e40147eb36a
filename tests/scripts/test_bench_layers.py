"""The bench of all layers in one launch: which binaries it times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmctl.plugins.fused.decoder_layers.tactics import NOWHERE, USUAL
from scripts.bench.layers import give_own_binaries, lengths_of


class Model:
    """As much of the bench's model as binaries are chosen by."""

    program = SimpleNamespace(limits=SimpleNamespace(max_seq_len=4096))
    chains = (SimpleNamespace(tactic=NOWHERE),)

    def set_tactics(self, tactics):
        self.tactics = tactics


def test_every_context_is_in_one_binary_and_those_asked_for_have_their_own():
    model = Model()
    give_own_binaries(model, [1000, 2000, 4000], lengths_of("2048,1024"))
    others, first, second = model.tactics
    assert [each.reach for each in model.tactics] == [4096, 1024, 2048]
    assert all(each.pace == USUAL for each in model.tactics)
    for context, its in ((1000, first), (2000, second), (4000, others)):
        assert [each for each in model.tactics if each.gains_at(context)] == [its]
    give_own_binaries(model, [1000, 4000], lengths_of(""))
    assert [each.gains for each in model.tactics] == [((1024, True), (4096, True))]


def test_a_length_that_no_step_is_padded_to_is_refused():
    with pytest.raises(SystemExit, match="padded to"):
        give_own_binaries(Model(), [1000], [1000])

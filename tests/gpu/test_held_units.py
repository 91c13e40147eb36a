"""Units that decoder_layers keeps in registers: the bits of the launches of its operators."""

from __future__ import annotations

import pytest
from support.chain import CONTEXTS, SMALL

from llmctl.plugins.fused.decoder_layers.tactics import USUAL
from scripts.bench.layers_support import Model


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [*((shape, 1) for shape in ("1b", *SMALL)), ("1b", 2), ("narrow", 2), ("groups of 8 rows", 2)],
)
def test_units_held_in_registers(shape, tokens):
    model = Model(SMALL.get(shape, shape), tokens=tokens)
    assert model.chains
    # A block has one unit of gate and up at least, two where K has more than four intervals.
    for held in (1, 2) if shape in ("1b", "groups of 8 rows") else (1,):
        model.set_pace(USUAL._replace(held=held))
        contexts = [context for context in CONTEXTS if context >= tokens]
        different = [context for context in contexts if not model.has_same_bits(context, tokens)]
        assert not different, f"{held} units"
        for _ in range(20):  # a step behind the other: the ring goes on where it was
            assert model.has_same_bits(1000, tokens)

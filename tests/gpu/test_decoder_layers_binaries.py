"""Decoder layers in one launch where contexts have binaries of their own: the bits of the launches
of their operators, also when one binary follows another."""

from __future__ import annotations

import pytest
import torch
from support.chain import CONTEXTS, SMALL

from llmctl.plugins.fused.decoder_layers.kernel import chain_spec
from llmctl.plugins.fused.decoder_layers.tactics import USUAL, divided
from scripts.bench.layers_support import Model

GAINS = ((1024, True), (2048, True), (4096, True))
GROWING = (1022, 1023, 1024, 1025, 1026, 2046, 2047, 2048, 2049, 2050, 3001, 2048, 1024, 1, 1500)
FORMS = [  # the last two: a second tile in the slot of the block's other team
    ("narrow", "fp8"),
    ("narrow", "w4a8_mxfp4_fp8"),
    ("each its own", "fp8"),
    ("each its own", "w4a8_mxfp4_fp8"),
]


@pytest.fixture(scope="module", params=FORMS, ids=" in ".join)
def model(request):
    name, qformat = request.param
    made = Model(SMALL[name], qformat=qformat)
    yield made
    del made
    torch.cuda.empty_cache()


@pytest.mark.parametrize("own", [[2048], [1024, 2048]], ids=str)
def test_binaries_for_some_contexts_give_the_bits_of_launches(model, own):
    model.set_tactics(divided(GAINS, USUAL, own))
    limits = model.program.limits
    units = {chain_spec(chain, limits).constants["MAX_UNITS"] for chain in model.chains}
    assert units == {32, 24} if own == [2048] else {32, 24, 16}
    contexts = sorted({*CONTEXTS, 1050, 1100, 1500, 2048})
    assert [context for context in contexts if not model.has_same_bits(context, 1)] == []
    assert model.logits[0].std() > 0.1, "logits that say nothing compare nothing"


def test_a_context_grows_from_one_binary_to_the_next_and_shrinks(model):
    model.set_tactics(divided(GAINS, USUAL, [2048]))
    wanted = [model.run(*model.step(context, 1), one_launch=False) for context in GROWING]
    model.use(one_launch=True)
    for turn in range(3):
        for context, (logits, cache) in zip(GROWING, wanted, strict=True):
            step, shape = model.step(context, 1)
            model.cache.copy_(model.before)
            torch.cuda.synchronize()
            model.program.upload(step, model.queue.handle)
            model.program.enqueue(shape, model.queue.handle)
            torch.cuda.synchronize()
            assert torch.equal(model.logits[:1], logits), (turn, context)
            assert torch.equal(model.cache, cache), (turn, context)

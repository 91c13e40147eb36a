"""Decoder layers in one launch whose keys and values come through the ring of weights: the bits of
the launches of their operators in contexts longer than 4,096 tokens."""

from __future__ import annotations

import pytest
import torch
from support.chain import SMALL

from llmctl.builder.config import BuildRequest
from llmctl.plugins.fused.decoder_layers.kernel import chain_spec, find_chains
from llmctl.plugins.fused.decoder_layers.tactics import SHORT, Pace, Tactic
from scripts.bench.layers_support import Model

MOST = 65536
# Borders of quads, groups and work items, the last tile's, and what short contexts have.
CONTEXTS = (
    *(1, 2, 64, 65, 1000, 1025, 2049, 4095, 4096, 4097, 4098, 4160, 5000, 8191, 8192, 8193),
    *(16385, 20000, 32767, 32768, 33000, 40000, 65535, 65536),
)
FORMS = ["narrow", "group of 8", "heads of 128", "each its own"]
LONG = Tactic(((SHORT, True), (MOST, True)), Pace(3, 3, 5, 8, 0))


def made_for_long(shape: str, tokens: int = 1, most: int = MOST, **options) -> Model:
    request = BuildRequest(max_batch_size=2, max_seq_len=most, **options.pop("build", {}))
    model = Model(SMALL.get(shape, shape), tokens, request, **options)
    model.set_tactics([LONG])
    spec = chain_spec(model.chains[0], model.program.limits)
    assert spec.constants["MAX_UNITS"] > 32 and "tensor_map" in spec.arguments
    return model


@pytest.fixture(scope="module", params=FORMS)
def model(request):
    made = made_for_long(request.param)
    yield made
    del made
    torch.cuda.empty_cache()


def test_long_contexts_have_the_bits_of_launches(model):
    different = [context for context in CONTEXTS if not model.has_same_bits(context, 1)]
    assert model.chains[0].is_whole and not different
    assert model.logits[0].std() > 0.1, "logits that say nothing compare nothing"


def test_launches_follow_each_other_whatever_their_contexts(model):
    contexts = (40000, 3, 20000, 5000, 65536, 64, 8193, 17)  # fewer work items, then more again
    wanted = [model.run(*model.step(context, 1), one_launch=False)[0] for context in contexts]
    for _ in range(3):
        for context, logits in zip(contexts, wanted, strict=True):
            found = model.run(*model.step(context, 1), one_launch=True)[0]
            assert torch.equal(found, logits), context


@pytest.mark.parametrize("name", ["1b", "narrow"])
def test_two_tokens_and_one_of_them_padding(name):
    made = made_for_long(name, 2, 32768)
    for context in (2, 65, 4097, 4160, 5000, 8193, 20000, 32768):
        assert made.has_same_bits(context, 2), context
        assert made.has_same_bits(context, 1, padding=1), context
    made.chains = find_chains(made.calls, made.program.limits, {1: [LONG], 2: [LONG]})
    for context in (4097, 20000):
        assert made.has_same_bits(context, 1, padding=1), context
        assert made.has_same_bits(context, 2), context


@pytest.mark.parametrize("kv_algo", ["FP8", "INT8", None])
@pytest.mark.parametrize("page", [64, 128])
def test_caches_of_other_types_and_pages(kv_algo, page):
    made = made_for_long("narrow", most=16384, build={"tokens_per_block": page}, kv_algo=kv_algo)
    assert [c for c in (1, 4097, 5000, 12345, 16384) if not made.has_same_bits(c, 1)] == []


def test_padding_and_steps_without_a_token_end(model):
    step, shape = model.step(20000, 1)
    step.kv_len[:] = 0
    step.cu_q[:] = 0
    step.slot_mapping[:] = -1
    for _ in range(2):
        _, cache = model.run(step, shape, one_launch=True)
        assert torch.equal(cache, model.before), "padding wrote to the cache"
    assert model.has_same_bits(20000, 1), "what came before is still there"

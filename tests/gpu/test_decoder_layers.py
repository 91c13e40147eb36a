"""Decoder layers in one launch: the bits of the launches of their operators."""

from __future__ import annotations

import gc

import pytest
import torch
from support.chain import CONTEXTS, SMALL

from llmctl.builder.config import BuildRequest
from llmctl.plugins.fused.decoder_layers.kernel import find_chains
from llmctl.plugins.fused.decoder_layers.tactics import EVERYWHERE
from llmctl.runtime.engines.graphs import capture_graph
from scripts.bench.layers_support import CONTEXT, Model

WEIGHTS = {"FP8": "fp8", "MXFP4": "w4a8_mxfp4_fp8"}


@pytest.fixture(
    scope="module", params=[f"{name} in {kind}" for name in ("1b", *SMALL) for kind in WEIGHTS]
)
def model(request):
    name, _, kind = request.param.rpartition(" in ")
    made = Model(SMALL.get(name, name), qformat=WEIGHTS[kind])
    yield made
    del made
    torch.cuda.empty_cache()


def test_one_launch_gives_the_bits_of_many(model):
    different = [context for context in CONTEXTS if not model.has_same_bits(context, 1)]
    assert model.chains[0].is_whole and not different
    assert model.logits[0].std() > 0.1, "logits that say nothing compare nothing"


@pytest.mark.parametrize("context", [1, 64, 1025])
def test_a_step_without_logits_writes_the_same_cache(model, context):
    """Then the last layer is a launch an operator, of which the KV write is left."""
    step, shape = model.step(context, 1, rows=0)
    assert shape.num_rows == 0
    _, wanted = model.run(step, shape, one_launch=False)
    _, cache = model.run(step, shape, one_launch=True)
    assert torch.equal(cache, wanted) and not torch.equal(cache, model.before)


def test_a_step_of_two_launches_has_the_bits_of_the_one_for_as_many_tokens():
    """A draft's first step of a round: one token and padding, or two, or none."""
    made = Model("1b")
    places = {1: [EVERYWHERE], 2: [EVERYWHERE]}
    made.chains = find_chains(made.calls, made.program.limits, places)
    assert [chain.tokens for chain in made.chains if chain.is_whole] == [1, 2]
    for context in (2, 65, 1000, 1025, 1500, 3001):
        for _ in range(2):
            assert made.has_same_bits(context, 1, padding=1), context
            assert made.has_same_bits(context, 2), context
    step, shape = made.step(100, 2)
    step.kv_len[:] = step.cu_q[:] = 0
    step.slot_mapping[:] = -1
    _, cache = made.run(step, shape, one_launch=True)
    assert torch.equal(cache, made.before) and made.has_same_bits(100, 1, padding=1)


def test_padding_and_steps_without_a_token_end(model):
    step, shape = model.step(100, 1)
    step.kv_len[:] = 0
    step.cu_q[:] = 0
    step.slot_mapping[:] = -1
    for _ in range(3):
        _, cache = model.run(step, shape, one_launch=True)
        assert torch.equal(cache, model.before), "padding wrote to the cache"
    assert model.has_same_bits(100, 1), "what came before is still there"


def test_launches_follow_each_other_whatever_their_contexts(model):
    contexts = (4095, 3, 2000, 1, 1025, 64, 4000, 17)  # fewer units, then more again
    wanted = [model.run(*model.step(context, 1), one_launch=False)[0] for context in contexts]
    for _ in range(5):
        for context, logits in zip(contexts, wanted, strict=True):
            found = model.run(*model.step(context, 1), one_launch=True)[0]
            assert torch.equal(found, logits), context


def test_a_graph_outlives_the_launches_it_was_captured_from(model):
    step, shape = model.step(300, 1)
    wanted = model.run(step, shape, one_launch=True)[0]
    queue = model.queue
    graph = capture_graph(queue, lambda: model.program.enqueue(shape, queue.handle))
    model.use(one_launch=True)  # forgets what was packed
    gc.collect()
    junk = [torch.full((1 << 12,), 7, dtype=torch.int64, device="cuda") for _ in range(64)]
    model.logits.zero_()
    model.cache.copy_(model.before)
    torch.cuda.synchronize()
    graph.replay()
    queue.synchronize()
    assert torch.equal(model.logits[:1], wanted) and len(junk) == 64


def test_counters_are_back_at_zero(model):
    model.run(*model.step(700, 1), one_launch=True)
    counters = model.program._kernels._scratch["decoder_layers.n1.u32.counters"].view(-1, 32)
    assert not counters[1:].any() and not counters[0, 0]


@pytest.mark.parametrize("shape", ["narrow", "groups of 8 rows"])
def test_two_tokens_and_one_of_them_padding(shape):
    model = Model(SMALL[shape], tokens=2)
    assert [(chain.tokens, chain.is_whole) for chain in model.chains] == [(2, True), (2, False)]
    for context in CONTEXTS[1:]:
        assert model.has_same_bits(context, 2), context
        both = model.step(context, 2, rows=2)
        many, one = (model.run(*both, one_launch=way) for way in (False, True))
        assert all(map(torch.equal, many, one)), f"logits of both tokens, {context}"
        assert model.has_same_bits(context, 1, padding=1), context
        assert model.has_same_bits(context, 1), context


@pytest.mark.parametrize("kv_algo", ["INT8", None])
def test_caches_of_other_types(kv_algo):
    request = BuildRequest(max_batch_size=2, max_seq_len=CONTEXT, tokens_per_block=64)
    model = Model(SMALL["narrow"], request=request, kv_algo=kv_algo)
    assert model.chains
    assert all(model.has_same_bits(context, 1) for context in CONTEXTS)


@pytest.mark.parametrize("scale", [1 / 32, 64.0])
def test_float16_whose_reciprocals_have_no_bound(scale):
    """Beyond 32 a quotient of float16 is divided, for a product with the reciprocal may differ."""
    request = BuildRequest(max_batch_size=2, max_seq_len=CONTEXT, dtype="float16")
    model = Model(SMALL["narrow"], request=request, scale=scale)
    assert model.chains
    assert all(model.has_same_bits(context, 1) for context in CONTEXTS)
    assert model.logits[0].std() > 0.1, "logits that say nothing compare nothing"

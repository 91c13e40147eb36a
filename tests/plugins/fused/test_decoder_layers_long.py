"""Contexts longer than 4,096 tokens in one launch of decoder layers: which engines have the binary,
and which steps take it. Bits: test_attention_emulated.py and tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.decoder_layers import ONE, env_of, measured

from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_kernels import fused_calls, meta_calls
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits, TensorMap
from llmctl.plugins.fused.decoder_layers.chain import Layer, find_layers
from llmctl.plugins.fused.decoder_layers.kernel import (
    chain_launch,
    chain_spec,
    find_chain,
    find_chains,
    open_chains,
    serves,
)
from llmctl.plugins.fused.decoder_layers.tactics import SHORT, Pace, Tactic
from scripts.bench.plan_support import plan_shape, planned
from scripts.models.planted_shapes import SHAPES

KEY = "h2048.i8192.a32.8x64"
FASTER = {"launches": 2.0, "one_launch": 1.0}
SLOWER = {"launches": 1.0, "one_launch": 2.0}
TIMES = {"1024": FASTER, "4096": FASTER, "8192": FASTER, "16384": SLOWER, "32768": FASTER}
LONG = Tactic(((SHORT, False), (131072, True)), Pace(3, 3, 5, 8, 0))


def planned_for(name: str, most: int, **options):
    request = BuildRequest(max_batch_size=2, max_seq_len=most, **options.pop("build", {}))
    return plan_shape(SHAPES[name], request, options.get("kv", "FP8"), options.get("q", "fp8"))


def layers_of(name: str, most: int = 131072, **options) -> tuple[list[Layer], StepLimits]:
    plan, limits = planned_for(name, most, **options)
    return find_layers([call for call, _ in meta_calls(plan)], limits), limits


def test_long_contexts_have_a_binary_of_their_own(monkeypatch):
    measured(monkeypatch, {KEY: TIMES}, {KEY: [3, 4, 7, 8, 2], f"{KEY}.long": [3, 3, 5, 8, 0]})
    plan, limits = planned_for("1b", 33280)
    records = fused_calls(plan, limits)
    measured(monkeypatch, {}, {})  # an engine has its own
    chains = open_chains([call for call, _ in meta_calls(plan)], limits, records)
    whole = [chain for chain in chains if chain.is_whole]
    short, long = (chain_spec(chain, limits) for chain in whole)
    assert short.name.endswith(".p3_4_7_8_2.1024+4096+") and ".u32." in short.name
    assert long.name.endswith(".p3_3_5_8_0.1024-4096-8192+16384-32768+") and ".u88." in long.name
    env = replace(env_of("1b"), limits=limits)
    served = {
        context: [serves(chain, env, replace(ONE, max_kv_len=context)) for chain in whole]
        for context in (1024, 4096, 8192, 16384, 32768, 33280)
    }
    assert served == {
        1024: [True, False],
        4096: [True, False],
        8192: [False, True],
        16384: [False, False],
        32768: [False, True],
        33280: [False, False],
    }


def test_an_engine_for_short_contexts_has_no_binary_for_long_ones(monkeypatch):
    measured(monkeypatch, {KEY: TIMES}, {})
    plan, limits = planned("1b")
    found = find_chains([call for call, _ in meta_calls(plan)], limits)
    assert [chain.tactic.is_long for chain in found] == [False, False]


def test_a_launch_is_given_the_whole_cache_in_boxes():
    layers, limits = layers_of("1b")
    chain = find_chain(layers, limits, tactic=LONG, whole=True)
    assert chain is not None
    launch = chain_launch(
        chain, replace(env_of("1b"), limits=limits), replace(ONE, max_kv_len=8192)
    )
    assert len(launch.arguments) == len(launch.spec.arguments)
    cache_map, cache = launch.arguments[-2:]
    assert isinstance(cache_map, TensorMap) and cache_map.tensor.numel() == cache.numel()
    assert (cache_map.box_rows, cache_map.box_columns) == (32 * 64 // 128, 128)


@pytest.mark.parametrize(
    ("name", "tokens", "options", "wanted"),
    [
        ("1b", 1, {}, True),
        ("1b", 2, {}, True),
        ("8b", 1, {}, True),
        ("8b", 2, {}, False),  # a ring of five units has no room for the tiles of both teams
        ("1b", 1, {"kv": None}, True),
        ("8b", 1, {"kv": None}, False),  # a unit has no room for two tiles
        ("1b", 1, {"q": "w4a8_mxfp4_fp8"}, False),
        ("1b", 1, {"build": {"tokens_per_block": 8}}, False),  # a box is no whole pattern
        ("1b", 1, {"build": {"tokens_per_block": 128}}, True),
    ],
)
def test_which_models_have_it(name, tokens, options, wanted):
    layers, limits = layers_of(name, **options)
    found = find_chain(layers, limits, most_tokens=tokens, tactic=LONG, whole=True)
    assert (found is not None) == wanted
    held = replace(LONG, pace=LONG.pace._replace(held=1))
    assert find_chain(layers, limits, most_tokens=tokens, tactic=held, whole=True) is None
    apart = replace(limits, num_sms=131)  # a team would have groups of several heads
    assert find_chain(layers, apart, most_tokens=tokens, tactic=LONG, whole=True) is None


def test_a_name_that_no_such_binary_has_is_refused(monkeypatch):
    measured(monkeypatch, {KEY: TIMES}, {KEY: [3, 4, 7, 8, 0]})
    plan, limits = planned_for("1b", 33280)
    records = fused_calls(plan, limits)
    calls = [call for call, _ in meta_calls(plan)]
    broken = replace(records[-1], kernel=records[-1].kernel.replace("p3_4_7_8_0", "p3_4_7_8_1"))
    with pytest.raises(CorruptEngine):
        open_chains(calls, limits, [broken])


@pytest.mark.parametrize(("name", "tokens"), [("1b", 1), ("1b", 2), ("8b", 1)])
def test_nothing_spills(name, tokens):
    layers, limits = layers_of(name)
    chain = find_chain(layers, limits, most_tokens=tokens, tactic=LONG, whole=True)
    assert chain is not None
    kernel = compile_kernel(chain_spec(chain, limits))
    assert kernel.local_bytes == 0 and kernel.shared_bytes <= 227 << 10

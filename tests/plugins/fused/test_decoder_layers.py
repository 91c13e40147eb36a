"""Which calls become one launch of decoder layers, and what that launch is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.decoder_layers import ONE, chain_of, env_of, measured

from llmctl.builder.engine_kernels import (
    meta_calls,
    scratch_bytes,
)
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.kernel_spec import PointerTable
from llmctl.plugins.fused.decoder_layers.chain import layer_fields
from llmctl.plugins.fused.decoder_layers.kernel import (
    chain_launch,
    chain_spec,
    exchange_bytes,
    find_chains,
    serves,
)
from llmctl.plugins.fused.decoder_layers.tactics import EVERYWHERE, Pace, stored_tactic
from scripts.bench.plan_support import planned
from scripts.models.planted_shapes import SHAPES

FIELDS = 23  # pointers of `Layer` in chain.cuh


@pytest.mark.parametrize("name", ["1b", "3b", "8b", "70b"])
def test_every_layer_before_the_last_is_in_the_chain(name):
    plan, _ = planned(name)
    found = chain_of(name)
    assert found is not None and len(found.layers) == SHAPES[name].layers - 1
    within = plan.ops[found.start : found.stop]
    assert within[0].name == "model.layers.0.self_attn.qkv_proj"
    assert within[-1].name == f"model.layers.{SHAPES[name].layers - 2}.mlp.down_proj"
    assert "gather_rows" not in {op.op for op in within} and not found.is_whole


@pytest.mark.parametrize("name", ["1b", "3b", "8b", "70b"])
@pytest.mark.parametrize("qformat", ["fp8", "w4a8_mxfp4_fp8"])
def test_where_the_only_token_gets_logits_the_last_layer_is_in_the_chain_too(name, qformat):
    plan, _ = planned(name, qformat=qformat)
    found, short = (chain_of(name, whole=whole, qformat=qformat) for whole in (True, False))
    assert found is not None and short is not None
    assert found.is_whole and len(found.layers) == SHAPES[name].layers
    spans, wanted = ([(x.start, x.stop) for x in c.layers] for c in (found, short))
    assert spans[:-1] == wanted
    assert [op.name for op in plan.ops[found.stop :]] == ["model.norm", "lm_head"]
    within = plan.ops[short.stop : found.stop]
    assert [op.op for op in within].count("gather_rows") == 2
    last = found.layers[-1]
    assert last.qkv_norm is not None
    assert last.residual is last.qkv_norm.outputs["residual_out"]
    assert str(last.attention.outputs["out"].dtype) == "torch.float8_e4m3fn"


@pytest.mark.parametrize(("num_rows", "wanted"), [(0, False), (1, True)])
def test_a_step_without_logits_leaves_the_last_layer_out(num_rows, wanted):
    whole, short, env = chain_of("1b", whole=True), chain_of("1b"), env_of("1b")
    assert whole is not None and short is not None
    shape = replace(ONE, num_rows=num_rows)
    assert serves(whole, env, shape) == wanted and serves(short, env, shape)


def test_a_chain_reads_the_weights_and_scales_of_its_layers():
    plan, _ = planned("1b")
    found = chain_of("1b")
    assert found is not None
    cache_tensor = env_of("1b").kv_cache
    for index, layer in enumerate(found.layers):
        fields = layer_fields(layer, cache_tensor)
        assert len(fields) == FIELDS
        weights = [fields[i] for i in (0, 4, 8, 12)]
        names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        for weight, name in zip(weights, names, strict=True):
            (op,) = [o for o in plan.ops if f"layers.{index}." in o.name and o.name.endswith(name)]
            (stored,) = [t for t in plan.tensors if t.name == op.inputs["weight"]]
            assert weight is not None and tuple(weight.shape) == tuple(stored.shape)
        assert (fields[16] is None) == (index == 0), "the first layer's tokens come normalized"


def test_a_launch_gives_what_the_kernel_takes():
    sizes: dict[str, int] = {}
    env, found = env_of("1b", sizes), chain_of("1b")
    assert found is not None
    launch = chain_launch(found, env, ONE)
    kinds = launch.spec.arguments
    assert len(launch.arguments) == len(kinds) and launch.grid == (env.limits.num_sms, 1, 1)
    table = launch.arguments[0]
    assert isinstance(table, PointerTable) and len(table.tensors) == FIELDS * len(found.layers)
    for kind, value in zip(kinds, launch.arguments, strict=True):
        assert isinstance(value, torch.Tensor | PointerTable) == kind.startswith("*"), kind
    assert sizes["decoder_layers.n1.u32.exchange"] == exchange_bytes(found, env.limits)


def test_memory_for_the_exchange_is_planned(monkeypatch):
    plan, limits = planned("1b")
    with_chain = scratch_bytes(plan, limits)
    monkeypatch.setattr("llmctl.builder.engine_kernels.find_chains", lambda *_: [])
    assert with_chain - scratch_bytes(plan, limits) > 2 * SHAPES["1b"].hidden * 132


def test_weights_are_brought_as_was_measured(monkeypatch):
    key, faster = "h2048.i8192.a32.8x64", {"1024": {"launches": 2.0, "one_launch": 1.0}}
    measured(monkeypatch, {key: faster, f"{key}.n2": faster}, {key: [2, 4, 7, 0, 1]})
    plan, limits = planned("1b")
    chains = find_chains([call for call, _ in meta_calls(plan)], limits)
    assert [(c.tokens, c.tactic.pace) for c in chains] == [
        (1, (2, 4, 7, 0, 1)),
        (1, (2, 4, 7, 0, 1)),
        (2, EVERYWHERE.pace),
        (2, EVERYWHERE.pace),
    ]
    for chain in chains:
        constants = chain_spec(chain, limits).constants
        names = ("IN_FLIGHT_SMALL", "IN_FLIGHT_AHEAD", "IN_FLIGHT", "EARLY_QKV", "HELD")
        assert Pace(*(constants[name] for name in names)) == chain.tactic.pace


def test_a_kernel_that_another_version_named_is_refused():
    shape = "decoder_layers.h2048.i8192.a32.8x64.bf16.kv_fp8e4nv.page32.u32"
    for older in ("n1s6f5t2g132.4096+", "n1.s6t2g132.p3_3_5_8.4096+"):
        with pytest.raises(CorruptEngine, match="another version of llmctl") as failure:
            stored_tactic(f"{shape}.{older}")
        assert failure.value.fix == "build the engine again"

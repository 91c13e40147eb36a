"""Engines for the cuda backend, built without a GPU: they hold what the cpu engine holds."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file
from support.cuda_build import CASES, LIMITS
from support.driver import RecordingDriver

from llmctl.builder import sources
from llmctl.builder.engine_format import Plan, open_engine, read_engine_config
from llmctl.builder.packing import PackedRows, RowOrder
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.device_kernels import DeviceKernels
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.ops.packed_linear import layout
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
from llmctl.runtime.engines.open_tensorrt import kernels_a_step
from llmctl.runtime.engines.rotary_tables import open_with_tables

QKV = [f"self_attn.{name}_proj" for name in "qkv"]


GATE_UP = ["mlp.gate_proj", "mlp.up_proj"]


def ops_of(plan: Plan, layer: int = 0) -> list[str]:
    """The operators of one layer, but attention and what the last layer does with its output."""
    left_out = ("paged_attention", "gather_rows")
    return [op.op for op in plan.ops if f".layers.{layer}." in op.name and op.op not in left_out]


@pytest.mark.parametrize("case", CASES)
def test_every_linear_is_packed_and_fused_as_far_as_there_are_kernels(case, cuda_engines) -> None:
    plan, _ = open_engine(cuda_engines(case))
    per_token = CASES[case][2] == "dynamic"
    qkv = ["packed_linear_rope_kv"]
    if case == "qwen3":  # a norm stands between product and rotation
        qkv = ["packed_linear", "rope_kv_write"]
    gate_up = ["packed_linear", "swiglu"] if per_token else ["packed_linear_swiglu"]
    attention = ["quantize"] if per_token else []  # its output has no scale before it is whole
    wanted = [*qkv, *attention, "packed_linear", "rms_norm", *gate_up, "packed_linear"]
    assert plan.ops[0].op == "embedding_norm"  # of the first layer
    assert ops_of(plan) == wanted
    assert plan.ops[-1].op == "packed_linear" and plan.ops[-1].outputs["out"] == plan.logits
    assert "linear" not in {op.op for op in plan.ops}


@pytest.mark.parametrize("case", CASES)
def test_no_step_launches_more_kernels_than_the_memory_plan_counts(
    case, cuda_engines, monkeypatch
) -> None:
    plan, tensors = open_with_tables(cuda_engines(case))
    config = read_engine_config(cuda_engines(case))
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    calls = make_calls(plan, bind_plan(plan, tensors, arena))
    monkeypatch.setattr(DeviceKernels, "_find", lambda self, spec: spec)
    limits = step_limits(plan, config.build_config)
    cache_type: torch.dtype = getattr(torch, plan.kv_cache.dtype)
    program = CudaProgram(calls, [], limits, "cpu", RecordingDriver())
    program.bind_kv_cache(torch.zeros(kv_cache_shape(plan, 4), dtype=cache_type))
    most = 0
    for tokens in (1, 2, 4, 8, 16, 31, 48):
        for rows in {1, tokens if tokens <= limits.max_num_rows else 1}:
            shape = StepShape(tokens, 1, rows, tokens, 96)
            packed = [program._pack(index, shape) for index in range(len(calls))]
            most = max(most, sum(len(item.prepared) for item in packed))
    assert len(plan.ops) <= most <= kernels_a_step(plan)


@pytest.mark.parametrize("case", CASES)
def test_attention_of_every_layer_is_launched_as_if_it_were_the_only_one(
    case, cuda_engines, monkeypatch
) -> None:
    plan, tensors = open_with_tables(cuda_engines(case))
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    calls = make_calls(plan, bind_plan(plan, tensors, arena))
    monkeypatch.setattr(DeviceKernels, "_find", lambda self, spec: spec)
    limits = step_limits(plan, read_engine_config(cuda_engines(case)).build_config)
    cache_type: torch.dtype = getattr(torch, plan.kv_cache.dtype)
    program = CudaProgram(calls, [], limits, "cpu", RecordingDriver())
    program.bind_kv_cache(torch.zeros(kv_cache_shape(plan, 4), dtype=cache_type))
    launches = import_module("llmctl.plugins.ops.paged_attention.kernel").launches
    layers = [index for index, call in enumerate(calls) if call.op == "paged_attention"]

    def plain(value):
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    for shape in (
        StepShape(1, 1, 1, 1, 96),
        StepShape(20, 2, 2, 19, 96),
        StepShape(9, 2, 9, 5, 50),
    ):
        seen = set()
        for index in layers:
            wanted = launches(calls[index], program._envs["tokens"], shape)
            found = program._pack(index, shape).prepared
            for own, launch in zip(found, wanted, strict=True):
                assert (own.kernel, own.grid) == (launch.spec, launch.grid)
                assert list(map(plain, own.arguments)) == list(map(plain, launch.arguments))
                seen.add(tuple(map(plain, own.arguments)))
        assert len(seen) >= len(layers) > 1  # each layer has its own cache


@pytest.mark.usefixtures("stand_ins")
def test_each_plugin_option_takes_its_fusion_apart(checkpoints, build_engine) -> None:
    apart = {
        "gemm_swiglu_plugin": ["packed_linear", "swiglu"],
        "norm_quant_fusion": ["packed_linear_swiglu", "quantize"],
    }
    for option, wanted in apart.items():
        folder = build_engine(
            checkpoints("qwen2 fp8"),
            {option: "disable"},
            backend="cuda",
            **LIMITS,
        )
        ops = ops_of(open_engine(folder)[0])
        start = ops.index(wanted[0], ops.index("rms_norm", 1))
        assert ops[start : start + 2] == wanted


@pytest.mark.parametrize("case", ["llama", "qwen2 fp8"])
def test_activations_lie_on_128_bytes(case, cuda_engines) -> None:
    plan, _ = open_engine(cuda_engines(case))
    offsets = [t.offset for t in plan.tensors if t.kind == "activation"]
    assert len(set(offsets)) > 2 and all(offset % 128 == 0 for offset in offsets)


@pytest.mark.parametrize("case", CASES)
def test_packed_weights_are_the_rows_of_the_checkpoint_in_their_order(
    case, checkpoints, cuda_engines
) -> None:
    """Every packed tensor, bit for bit, from the checkpoint and `layout` alone."""
    plan, tensors = open_engine(cuda_engines(case))
    stored = load_file(checkpoints(case) / "model.safetensors")
    config = read_engine_config(cuda_engines(case)).pretrained_config
    heads = [config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_size")]
    checked = 0
    for op in plan.ops:
        if not op.op.startswith("packed_linear"):
            continue
        modules = parts_of(op.name)
        if op.name == "lm_head" and config["tie_word_embeddings"]:
            modules = ["model.embed_tokens"]
        weight = torch.cat([raw(stored[f"{m}.weight"]) for m in modules])
        order = {
            "packed_linear": (layout.plain_order, [len(weight)]),
            "packed_linear_swiglu": (layout.pair_order, [config["intermediate_size"]]),
            "packed_linear_rope_kv": (layout.rope_order, heads),
        }[op.op]
        order = order[0](*order[1])
        assert (order < 0).sum() == -len(weight) % 64
        dtype = stored[f"{modules[0]}.weight"].dtype
        wanted = layout.pack(layout.reorder(weight, order).view(dtype))
        found = tensors[op.inputs["weight"]]
        assert found.dtype == dtype and torch.equal(raw(found), raw(wanted)), op.name
        checked += 1
        for role in ("bias", "weight_scale"):
            assert (role in op.inputs) == (f"{modules[0]}.{role}" in stored)
            if role in op.inputs:
                rows = [len(stored[f"{m}.weight"]) for m in modules]
                parts = [stored[f"{m}.{role}"].flatten() for m in modules]
                whole = torch.cat([p.expand(r) for p, r in zip(parts, rows, strict=True)])
                assert torch.equal(tensors[op.inputs[role]], layout.reorder(whole, order)), op.name
    assert checked == 2 * 4 + 1


def parts_of(name: str) -> list[str]:
    """The checkpoint modules that a linear of the engine merges."""
    for merged, parts in (("self_attn.qkv_proj", QKV), ("mlp.gate_up_proj", GATE_UP)):
        if name.endswith(merged):
            return [name.removesuffix(merged) + part for part in parts]
    return [name]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in rows: FP8 can neither be stacked nor compared."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("inner", [200, 201])  # rows of whole 8-byte words, and others
def test_a_weight_larger_than_a_chunk_is_packed_piece_by_piece(inner: int, monkeypatch) -> None:
    whole = torch.randn(251, inner).bfloat16()
    weights = {"a": whole[1:151], "b": whole[151:]}  # with an odd offset in memory

    class Reader:
        def read(self, name: str) -> torch.Tensor:
            return weights[name]

    rows = sources.Rows((("a", (150, inner)), ("b", (100, inner))), "bfloat16")
    source = PackedRows(rows, RowOrder("plain", (250,)))
    wanted = layout.pack(layout.reorder(whole[1:], layout.plain_order(250)))
    for chunk_bytes, count in ((1 << 20, 1), (3 * 64 * 512, 2), (1, 4)):
        monkeypatch.setattr("llmctl.builder.packing.CHUNK_BYTES", chunk_bytes)
        pieces = list(source.chunks(Reader()))
        assert len(pieces) == count and torch.equal(torch.cat(pieces), wanted)
        assert tuple(wanted.shape) == source.shape


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_cpu_engine(
    case, checkpoints, cuda_engines, build_engine, open_test_engine, some_tokens
) -> None:
    tokens = some_tokens(37)
    plain = build_engine(checkpoints(case), **LIMITS)
    found = open_test_engine(cuda_engines(case), "reference").run(tokens)
    # The same references over the unpacked, unfused plan: no bit may differ.
    assert torch.equal(found, open_test_engine(plain, "reference").run(tokens))
    wanted = open_test_engine(plain, "cpu").run(tokens)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < 0.03, error  # sums in another order move bfloat16 by a few units
    assert wanted.std() > 0.1


@pytest.mark.usefixtures("stand_ins")
def test_fusions_change_no_bit(
    checkpoints, cuda_engines, build_engine, open_test_engine, some_tokens
):
    tokens = some_tokens(20)
    wanted = open_test_engine(cuda_engines("qwen2 fp8"), "reference").run(tokens)
    for option in ("gemm_swiglu_plugin", "norm_quant_fusion"):
        folder = build_engine(
            checkpoints("qwen2 fp8"),
            {option: "disable"},
            backend="cuda",
            **LIMITS,
        )
        assert torch.equal(open_test_engine(folder, "reference").run(tokens), wanted), option

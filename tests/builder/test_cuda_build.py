"""Engines for the cuda backend, built without a GPU: what they hold is what the cpu engine holds.

The plan is executed by the operators' references, which unpack weights and compose the fused
operators from plain ones. So equal logits mean that packing, row orders and fusions are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.driver import RecordingDriver

from llmctl.builder import sources
from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan, open_engine, read_engine_config
from llmctl.builder.engine_kernels import kernel_specs, step_limits
from llmctl.builder.packing import PackedRows, RowOrder
from llmctl.builder.planted import LoadFormat
from llmctl.cli.main import execute
from llmctl.errors import BadConfig, CheckpointNotFound, UnknownQuantization, Unsupported
from llmctl.plugins.backends.cuda import nvrtc
from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.cubin import read_cubin
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.ops.packed_linear import layout
from llmctl.runtime.engines.cuda_engine import step_limits as step_limits_of
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
from llmctl.runtime.engines.open_tensorrt import kernels_a_step

# 5 heads of 80 leave padding in the last row tile, and so does a vocabulary of 131.
SMALL = {
    "hidden_size": 144,
    "intermediate_size": 208,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
LIMITS = {"max_batch_size": 1, "max_num_tokens": 48, "max_draft_len": 47, "max_seq_len": 96}
QKV = [f"self_attn.{name}_proj" for name in "qkv"]
GATE_UP = ["mlp.gate_proj", "mlp.up_proj"]
FP8_MAX = 448.0

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {**SMALL, "head_dim": 80}, "none"),
    "llama tied, biases": (
        "llama",
        {"head_dim": 64, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "none",
    ),
    "qwen2": ("qwen2", {"hidden_size": 128, "num_attention_heads": 2}, "none"),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 64}, "none"),
    "llama fp8": ("llama", {**SMALL, "head_dim": 80}, "static"),
    "qwen2 fp8": ("qwen2", {"hidden_size": 128, "num_attention_heads": 2}, "static"),
    "llama fp8 rows, tokens": ("llama", {**SMALL, "head_dim": 64}, "dynamic"),
}


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, module_model: Callable[..., Any]
) -> Callable[[str], Path]:
    """checkpoints(case) -> its folder, made once."""
    made: dict[str, Path] = {}

    def checkpoint(case: str) -> Path:
        if case not in made:
            family, fields, quantization = CASES[case]
            folder = tmp_path_factory.mktemp("checkpoint")
            model = module_model(family, dtype="bfloat16", gain=0.5, **fields)
            model.save_pretrained(folder)
            if quantization != "none":
                quantize(folder, is_static=quantization == "static")
            made[case] = folder
        return made[case]

    return checkpoint


def quantize(folder: Path, is_static: bool) -> None:
    """Make a BF16 checkpoint one of ModelOpt's FP8; every scale differs from every other."""
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate(sorted(n for n in tensors if n.endswith("_proj.weight"))):
        weight, module = tensors[name].float(), name.removesuffix(".weight")
        amax = weight.abs().amax() if is_static else weight.abs().amax(1, keepdim=True)
        scale = amax * (1 + index / 64) / FP8_MAX
        tensors[f"{module}.weight_scale"] = scale
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        if is_static:
            tensors[f"{module}.input_scale"] = torch.tensor((8 + index / 8) / FP8_MAX)
            if module.endswith(("k_proj", "v_proj")):
                tensors[f"{module}.{module[-6]}_scale"] = torch.tensor((9 + index / 8) / FP8_MAX)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    algo = "FP8" if is_static else "FP8_PER_CHANNEL_PER_TOKEN"
    kv_algo = "FP8" if is_static else None
    quantization = {
        "quant_algo": algo,
        "kv_cache_quant_algo": kv_algo,
        "exclude_modules": ["lm_head"],
    }
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def cuda_engines(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """cuda_engines(case) -> the folder of its cuda engine, built once."""
    made: dict[str, Path] = {}

    def engine(case: str) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("engine") / "cuda"
            run_build(plan_build(checkpoints(case), BuildRequest(**LIMITS), backend="cuda"), folder)
            made[case] = folder
        return made[case]

    return engine


@pytest.fixture(scope="module")
def fp8_engine(cuda_engines: Callable[[str], Path]) -> Path:
    """The FP8 engine with the most features: biases, static scales, FP8 KV cache."""
    return cuda_engines("qwen2 fp8")


def ops_of(plan: Plan, layer: int = 0) -> list[str]:
    """The operators of one layer, but attention and what the last layer does with its output."""
    left_out = ("paged_attention", "gather_rows")
    return [op.op for op in plan.ops if f".layers.{layer}." in op.name and op.op not in left_out]


# ---- what the plan says ----


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
    plan, tensors = open_engine(cuda_engines(case))
    config = read_engine_config(cuda_engines(case))
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    calls = make_calls(plan, bind_plan(plan, tensors, arena))
    monkeypatch.setattr(CudaProgram, "_find", lambda self, spec: spec)
    limits = step_limits_of(config, plan)
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
    plan, tensors = open_engine(cuda_engines(case))
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    calls = make_calls(plan, bind_plan(plan, tensors, arena))
    monkeypatch.setattr(CudaProgram, "_find", lambda self, spec: spec)
    limits = step_limits_of(read_engine_config(cuda_engines(case)), plan)
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


def test_each_plugin_option_takes_its_fusion_apart(checkpoints, build_engine) -> None:
    apart = {
        "gemm_swiglu_plugin": ["packed_linear", "swiglu"],
        "norm_quant_fusion": ["packed_linear_swiglu", "quantize"],
    }
    for option, wanted in apart.items():
        folder = build_engine(
            checkpoints("qwen2 fp8"), {option: "disable"}, backend="cuda", **LIMITS
        )
        ops = ops_of(open_engine(folder)[0])
        start = ops.index(wanted[0], ops.index("rms_norm", 1))
        assert ops[start : start + 2] == wanted


@pytest.mark.parametrize("case", ["llama", "qwen2 fp8"])
def test_activations_lie_on_128_bytes(case, cuda_engines) -> None:
    plan, _ = open_engine(cuda_engines(case))
    offsets = [t.offset for t in plan.tensors if t.kind == "activation"]
    assert len(set(offsets)) > 2 and all(offset % 128 == 0 for offset in offsets)


# ---- what the weights are ----


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


# ---- what comes out ----


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


def test_fusions_change_no_bit(
    checkpoints, cuda_engines, build_engine, open_test_engine, some_tokens
):
    tokens = some_tokens(20)
    wanted = open_test_engine(cuda_engines("qwen2 fp8"), "reference").run(tokens)
    for option in ("gemm_swiglu_plugin", "norm_quant_fusion", "use_fp8_context_fmha"):
        folder = build_engine(
            checkpoints("qwen2 fp8"), {option: "disable"}, backend="cuda", **LIMITS
        )
        assert torch.equal(open_test_engine(folder, "reference").run(tokens), wanted), option


# ---- kernels ----


def test_kernels_are_stored_and_read_back_whole(fp8_engine) -> None:
    plan, tensors = open_engine(fp8_engine)
    config = read_engine_config(fp8_engine)
    request = BuildRequest(**LIMITS)
    specs = {
        spec.name: spec
        for spec in kernel_specs(plan, step_limits(plan, _Limits(request, config.build_config)))
    }
    assert [kernel.name for kernel in plan.kernels] == sorted(specs)
    for kernel in plan.kernels:
        cubin = tensors[kernel.tensor].numpy().tobytes()
        assert len(cubin) == kernel.num_bytes
        assert CompiledKernel.from_metadata(kernel.metadata, cubin) == compile_kernel(
            specs[kernel.name]
        )
        assert read_cubin(cubin, kernel.metadata["entry"]).registers == kernel.metadata["registers"]
    assert config.compute_capability == "9.0" and config.backend == "cuda"
    assert config.versions["nvrtc"] == nvrtc.version()
    assert config.versions["triton"] == version("triton")
    assert plan.scratch_bytes > 0


class _Limits:
    """`BuildConfig` as config.json stores it."""

    def __init__(self, request: BuildRequest, stored: Any) -> None:
        self.max_batch_size = stored["max_batch_size"]
        self.max_seq_len = stored["max_seq_len"]
        self.max_draft_len = request.max_draft_len


def test_layers_share_kernels(checkpoints, cuda_engines) -> None:
    """A model of 80 layers has the kernels of one of 3: the last, the first and another."""
    config = json.loads((checkpoints("llama") / "config.json").read_text())
    names = []
    for count in (3, 12):
        folder = checkpoints("llama").parent / f"{count}"
        folder.mkdir(exist_ok=True)
        text = json.dumps({**config, "num_hidden_layers": count})
        (folder / "config.json").write_text(text)
        engine = plan_build(
            folder, BuildRequest(**LIMITS), backend="cuda", load_format=LoadFormat("dummy")
        )
        names.append([kernel.name for kernel in engine.plan.kernels])
    assert names[0] == names[1]


def test_progress_is_told_for_every_kernel(checkpoints) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = plan_build(
        checkpoints("llama"),
        BuildRequest(**LIMITS),
        backend="cuda",
        on_kernel=lambda *step: seen.append(step),
    )
    count = len(engine.plan.kernels)
    assert [(index, total) for _, index, total in seen] == [(i, count) for i in range(count)]


def test_inspect_shows_kernels_and_tactics(fp8_engine, capsys) -> None:
    assert execute(["inspect", str(fp8_engine), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    plan, _ = open_engine(fp8_engine)
    shown = {kernel["name"]: kernel for kernel in described["kernels"]}
    assert set(shown) == {kernel.name for kernel in plan.kernels}
    for kernel in plan.kernels:
        for name in ("registers", "shared_bytes", "threads"):
            assert shown[kernel.name][name] == kernel.metadata[name]
    tactics = {op["tactic"] for group in described["layers"] for op in group["ops"]}
    assert tactics == {op.tactic for op in plan.ops}
    assert described["memory"]["scratch_bytes"] == plan.scratch_bytes


# ---- no weights ----


@pytest.mark.parametrize("case", ["llama", "llama fp8", "llama fp8 rows, tokens"])
def test_a_generated_engine_has_the_plan_of_a_stored_one(case, checkpoints, cuda_engines, tmp_path):
    source = checkpoints(case)
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).is_file():
            (tmp_path / name).write_bytes((source / name).read_bytes())
    engine = plan_build(
        tmp_path, BuildRequest(**LIMITS), backend="cuda", load_format=LoadFormat("dummy", seed=3)
    )
    run_build(engine, tmp_path / "engine")
    plan, tensors = open_engine(tmp_path / "engine")
    wanted, stored = open_engine(cuda_engines(case))
    assert plan.ops == wanted.ops and plan.kernels == wanted.kernels
    assert [(t.name, t.dtype, t.shape) for t in plan.tensors] == [
        (t.name, t.dtype, t.shape) for t in wanted.tensors
    ]
    kept = {kernel.tensor for kernel in plan.kernels} | {"rotary"}
    assert set(tensors) == kept and kept < set(stored)
    assert torch.equal(tensors["rotary"], stored["rotary"])
    weights = read_engine_config(tmp_path / "engine").weights
    assert weights == {"load_format": "dummy", "seed": 3}


def test_planted_weights_name_the_tokens_they_speak_of(checkpoints) -> None:
    load_format = LoadFormat("planted", seed=5, role="draft", acceptance=0.5)
    engine = plan_build(
        checkpoints("llama"), BuildRequest(**LIMITS), backend="cuda", load_format=load_format
    )
    assert engine.config.weights == {
        "load_format": "planted",
        "seed": 5,
        "role": "draft",
        "acceptance": 0.5,
        "ordinary_tokens": [3, 131],  # bos is 1 and eos is 2
    }
    with pytest.raises(Unsupported, match="tied to the embedding"):
        plan_build(
            checkpoints("llama tied, biases"),
            BuildRequest(**LIMITS),
            backend="cuda",
            load_format=load_format,
        )


# ---- refusals ----


def test_a_float32_model_is_refused_with_what_to_do(new_model, save) -> None:
    folder = save(new_model("llama", **CASES["llama"][1]))
    with pytest.raises(Unsupported, match="the model's dtype is float32") as caught:
        plan_build(folder, BuildRequest(**LIMITS), backend="cuda")
    assert caught.value.fix == "--dtype bfloat16"
    request = BuildRequest(**LIMITS, dtype="bfloat16")
    assert plan_build(folder, request, backend="cuda").config.backend == "cuda"


def test_weight_only_fp8_is_refused(checkpoints, tmp_path) -> None:
    source = checkpoints("llama fp8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownQuantization, match="None activations"):
        plan_build(tmp_path, BuildRequest(**LIMITS), backend="cuda")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "cuda", "--compute-capability", "8.9"], "--compute-capability 8.9"),
        (["--backend", "cuda", "--compute-capability", "10.0"], "--compute-capability 10.0"),
        (["--backend", "cpu", "--compute-capability", "9.0"], "no effect on cpu engines"),
        (["--backend", "cuda", "--dtype", "float32"], "the model's dtype is float32"),
        (["--backend", "opencl"], "backend is opencl; it must be one of"),
        (["--seed", "3"], "--seed is for --load-format dummy and planted"),
        (["--load-format", "planted", "--planted-acceptance", "1.5"], "--planted-acceptance is"),
        (["--load-format", "random"], "--load-format is random"),
        (["--backend", "cpu", "--load-format", "dummy"], "weights are generated on a GPU"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    arguments, text, checkpoints, tmp_path, capsys
) -> None:
    base = ["build", "--checkpoint-dir", str(checkpoints("llama"))]
    assert execute([*base, "--output-dir", str(tmp_path / "engine"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("field", ["seed", "acceptance"])
@pytest.mark.parametrize("value", ["a", [1], {}, True, None])
def test_odd_recipes_of_planted_weights_are_refused(field, value) -> None:
    with pytest.raises(BadConfig, match=field):
        LoadFormat("planted", **{field: value})


def test_a_folder_without_config_generates_nothing(tmp_path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json does not exist"):
        plan_build(tmp_path, BuildRequest(), backend="cuda", load_format=LoadFormat("dummy"))

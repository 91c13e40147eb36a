"""Forms of FP8 checkpoints, merged scales, and options that change the plan alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8 import modelopt_checkpoint, relative_l2
from transformers import PreTrainedModel

from llmctl.builder.engine_format import open_engine


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite the one weight file of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def modelopt_source(
    tmp_path_factory: pytest.TempPathFactory, module_model: Callable[..., PreTrainedModel]
) -> Path:
    """One ModelOpt FP8 checkpoint with an FP8 KV cache; tests copy it."""
    folder = tmp_path_factory.mktemp("modelopt") / "fp8"
    rows = torch.arange(64).view(2, 32)
    modelopt_checkpoint(module_model("llama", gain=0.5), folder, "FP8_DEFAULT_CFG", rows, True, [1])
    return folder


@pytest.fixture
def modelopt_fp8(modelopt_source: Path, tmp_path: Path) -> Path:
    """A private copy of `modelopt_source`."""
    return Path(shutil.copytree(modelopt_source, tmp_path / "fp8"))


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_spelling_of_kv_scales_is_the_same_engine(
    k_name: str, v_name: str, modelopt_fp8, build_engine, open_test_engine, some_tokens
) -> None:
    tokens = some_tokens(20)
    wanted = open_test_engine(build_engine(modelopt_fp8), "reference").run(tokens)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for old, new in (("k_proj.k_scale", k_name), ("v_proj.v_scale", v_name)):
                if name.endswith(old):
                    tensors[name.removesuffix(old) + new] = tensors.pop(name)

    engine = open_test_engine(build_engine(edit(modelopt_fp8, rename)), "reference")
    assert torch.equal(engine.run(tokens), wanted)


def test_one_kv_scale_for_both_is_read(modelopt_fp8, build_engine, open_test_engine) -> None:
    def join(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            k = tensors.pop(f"{prefix}.k_proj.k_scale")
            v = tensors.pop(f"{prefix}.v_proj.v_scale")
            tensors[f"{prefix}.kv_scale"] = torch.maximum(k, v)

    engine = open_test_engine(build_engine(edit(modelopt_fp8, join)), "reference")
    assert torch.isfinite(engine.run([1, 2, 3])).all()


def test_a_nested_quantization_file_alone_is_enough(
    modelopt_fp8, build_engine, open_test_engine
) -> None:
    wanted = open_test_engine(build_engine(modelopt_fp8), "reference").run([3, 1, 4])
    config = json.loads((modelopt_fp8 / "config.json").read_text())
    del config["quantization_config"]  # as ModelOpt before 0.31
    (modelopt_fp8 / "config.json").write_text(json.dumps(config))
    engine = open_test_engine(build_engine(modelopt_fp8), "reference")
    assert torch.equal(engine.run([3, 1, 4]), wanted)


def declare_autofp8(folder: Path, activations: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": activations,
        "ignored_layers": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink()


def test_autofp8_static_is_the_same_engine(modelopt_fp8, build_engine, open_test_engine) -> None:
    wanted = open_test_engine(build_engine(modelopt_fp8), "reference").run([3, 1, 4])
    declare_autofp8(modelopt_fp8, "static")
    engine = open_test_engine(build_engine(modelopt_fp8, kv_cache_dtype="fp8"), "reference")
    assert torch.equal(engine.run([3, 1, 4]), wanted)


def test_autofp8_dynamic_is_one_scale_per_tensor_and_per_token(
    modelopt_fp8, build_engine, open_test_engine, module_model, some_tokens
) -> None:
    """The oracle is transformers' model with torch's own arithmetic in its linears."""
    tensors = load_file(modelopt_fp8 / "model.safetensors")
    model = module_model("llama", gain=0.5).float()

    def linear(module: torch.nn.Linear, scale: torch.Tensor) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            step = x.abs().amax(-1, keepdim=True) / 448
            codes = (x / step).to(torch.float8_e4m3fn)
            return torch.nn.functional.linear(codes.float() * step, module.weight) * scale

        return forward

    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            module.weight.data = tensors[f"{name}.weight"].float()
            module.forward = linear(module, tensors[f"{name}.weight_scale"].float())
    tokens = some_tokens(40)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    declare_autofp8(modelopt_fp8, "dynamic")
    engine = open_test_engine(build_engine(modelopt_fp8, kv_cache_dtype="none"), "reference")
    assert relative_l2(engine.run(tokens), wanted) < 1e-3


def test_merged_linears_take_the_largest_input_scale(
    modelopt_fp8, build_engine, open_test_engine
) -> None:
    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.input_scale"].mul_(3)

    name = "model.layers.0.self_attn.q_proj.input_scale"
    original = load_file(modelopt_fp8 / "model.safetensors")[name]
    _, weights = open_engine(build_engine(edit(modelopt_fp8, stretch)))
    found = weights["model.layers.0.self_attn.qkv_proj.input_scale"]
    assert torch.equal(found, 3 * original.reshape(1))


def test_merged_weights_keep_each_parts_own_scale(modelopt_fp8, build_engine) -> None:
    stored = load_file(modelopt_fp8 / "model.safetensors")
    _, weights = open_engine(build_engine(modelopt_fp8))
    prefix = "model.layers.1.self_attn"
    parts = [stored[f"{prefix}.{name}_proj.weight"] for name in "qkv"]
    scales = [stored[f"{prefix}.{name}_proj.weight_scale"] for name in "qkv"]
    merged = weights[f"{prefix}.qkv_proj.weight"].view(torch.uint8)
    assert torch.equal(merged, torch.cat([part.view(torch.uint8) for part in parts]))
    wanted = torch.cat([s.expand(len(part)) for s, part in zip(scales, parts, strict=True)])
    assert torch.equal(weights[f"{prefix}.qkv_proj.weight_scale"], wanted)


@pytest.mark.parametrize("pattern", ["model.layers.0*", "re:model[.]layers[.]0[.].*"])
def test_excluded_layers_stay_unquantized(
    pattern: str, modelopt_fp8, build_engine, open_test_engine, new_model
) -> None:
    plain = new_model("llama", gain=0.5).state_dict()

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            if name.endswith("proj.weight"):
                tensors[name] = plain[name].clone()
            elif name.endswith(("weight_scale", "input_scale")):
                del tensors[name]

    config = json.loads((modelopt_fp8 / "config.json").read_text())
    config["quantization_config"]["ignore"].append(pattern)
    (modelopt_fp8 / "config.json").write_text(json.dumps(config))
    engine = open_test_engine(build_engine(edit(modelopt_fp8, restore)), "reference")
    dtypes = {t.name: t.dtype for t in engine.plan.tensors if t.name.endswith("qkv_proj.weight")}
    assert list(dtypes.values()) == ["float32", "float8_e4m3fn"]
    assert torch.isfinite(engine.run([1, 2, 3])).all()


def test_fusion_switches_change_the_plan_and_not_the_values(
    modelopt_fp8, build_engine, open_test_engine, some_tokens, program_name
) -> None:
    tokens = some_tokens(20)
    fused = open_test_engine(build_engine(modelopt_fp8), program_name)
    assert "quantize" not in {op.op for op in fused.plan.ops}
    switch = {"norm_quant_fusion": "disable"}
    apart = open_test_engine(build_engine(modelopt_fp8, switch), program_name)
    assert len([op for op in apart.plan.ops if op.op == "quantize"]) == 2 * 4
    assert torch.equal(fused.run(tokens), apart.run(tokens))


def test_a_quantized_lm_head_is_used(modelopt_fp8, build_engine, open_test_engine) -> None:
    wanted = open_test_engine(build_engine(modelopt_fp8), "reference").run([3, 1, 4])

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["lm_head.weight"]
        scale = weight.abs().max() / 448
        tensors["lm_head.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = scale
        tensors["lm_head.input_scale"] = torch.tensor(4.0 / 448)

    config = json.loads((modelopt_fp8 / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["model.embed_tokens"]
    (modelopt_fp8 / "config.json").write_text(json.dumps(config))
    engine = open_test_engine(build_engine(edit(modelopt_fp8, quantize)), "reference")
    assert engine.plan.ops[-1].tactic == "cpu.linear.fp8"
    assert 0 < relative_l2(engine.run([3, 1, 4]), wanted) < 0.1


def test_kv_cache_dtype_none_keeps_the_cache_in_the_model_dtype(
    modelopt_fp8, build_engine, open_test_engine
) -> None:
    engine = open_test_engine(build_engine(modelopt_fp8, kv_cache_dtype="none"), "reference")
    assert engine.plan.kv_cache.dtype == "float32"
    assert not any("k_scale" in op.inputs for op in engine.plan.ops)

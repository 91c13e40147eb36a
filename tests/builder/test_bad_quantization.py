"""Quantized checkpoints with defects, and builds that are cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_checkpoints import (
    QUANTIZATION,
    Tensors,
    build,
    configure,
    drop,
    put,
    refuse,
)
from support.checkpoint import edit

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.errors import (
    BadTensorShape,
    BadTensorValue,
    CorruptFile,
    MissingTensor,
    OutOfDisk,
    OutputExists,
    UnexpectedTensor,
    UnknownQuantization,
)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_an_fp8_weight_holding_nan(quantized: Path, byte: int) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[5, 5] = byte

    refuse(edit(quantized, change), BadTensorValue, f"{name} holds NaN")


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["mlp.down_proj.weight_scale", "mlp.up_proj.input_scale", "self_attn.v_proj.v_scale"]
)
def test_a_scale_that_cannot_be(quantized: Path, name: str, value: float) -> None:
    change = put(f"model.layers.0.{name}", torch.tensor(value))
    refuse(edit(quantized, change), BadTensorValue, f"{name} holds {value}")


def test_a_scale_of_the_wrong_size(quantized: Path) -> None:
    change = put("model.layers.0.mlp.down_proj.weight_scale", torch.ones(3))
    refuse(edit(quantized, change), BadTensorShape, "1 or 64 elements")


def test_a_scale_for_every_block_is_not_one_for_every_row(quantized: Path) -> None:
    """A weight [N, 16384] has N/128 times 128 blocks, and as many rows."""
    change = put("model.layers.0.mlp.down_proj.weight_scale", torch.ones(2, 32))
    refuse(edit(quantized, change), BadTensorShape, r"\[2, 32\]; a float scale of 1 or 64 elements")


@pytest.mark.parametrize("stated", [{}, {"weight_block_size": None}], ids=["absent", "null"])
@pytest.mark.parametrize("shape", [(), (1, 1)])
@pytest.mark.parametrize("is_whole", [True, False], ids=["every scale", "beside AutoFP8's"])
def test_the_tensors_of_transformers_fp8_are_not_those_of_autofp8(
    quantized: Path, stated: dict[str, Any], shape: tuple[int, ...], is_whole: bool
) -> None:
    """One quant_method of two meanings: transformers takes 128x128 where AutoFP8 says nothing."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            scale = tensors.pop(name) if is_whole else tensors[name]
            tensors[f"{name}_inv"] = scale.reshape(shape).clone()

    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    configure(quantized, quantization_config=fields | stated)
    text = "q_proj.weight_scale_inv .* transformers' FineGrainedFP8"
    refuse(edit(quantized, change), UnknownQuantization, text)


@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_missing_scale_is_named_with_the_probable_reason(quantized: Path, scale: str) -> None:
    name = f"model.layers.0.mlp.down_proj.{scale}"
    refuse(edit(quantized, drop(name)), MissingTensor, f"lacks {name}; probably")


def test_a_declared_kv_cache_without_scales(quantized: Path) -> None:
    change = drop("model.layers.0.self_attn.v_proj.v_scale")
    error = refuse(edit(quantized, change), MissingTensor, "no KV cache scales for layer 0")
    assert "--kv-cache-dtype none" in error.fix
    assert build(quantized, kv_cache_dtype="none").is_dir()


def test_an_fp8_cache_asked_of_a_plain_checkpoint(plain: Path) -> None:
    refuse(plain, MissingTensor, "no KV cache scales", kv_cache_dtype="fp8")


def test_fp8_weights_without_a_quantization_config(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    refuse(quantized, UnknownQuantization, "neither config.json nor hf_quant_config.json")


def test_a_plain_checkpoint_that_calls_itself_fp8(plain: Path) -> None:
    configure(plain, quantization_config=QUANTIZATION)
    refuse(plain, BadTensorShape, "is F32, but the config declares FP8")


def test_an_fp8_weight_that_the_config_excludes(quantized: Path) -> None:
    ignore = ["lm_head", "*.o_proj"]
    configure(quantized, quantization_config={**QUANTIZATION, "ignore": ignore})
    refuse(quantized, BadTensorShape, "o_proj.weight .*excludes it")


def test_an_affine_kv_cache(quantized: Path) -> None:
    change = put("model.layers.0.self_attn.k_proj.k_bias", torch.zeros(1, 2, 1, 16))
    refuse(edit(quantized, change), UnknownQuantization, "k_bias, which llmctl does not know")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "FP8_BLOCK_SCALES"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "KV cache in NVFP4",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "by fp8 as FP8_BLOCK_SCALES",
        ),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
    ],
)
def test_other_quantizations_are_refused_with_what_is_read(
    quantized: Path, fields: dict[str, Any], text: str
) -> None:
    configure(quantized, quantization_config=fields)
    edit(quantized, drop("model.layers.0.mlp.up_proj.weight"))  # such formats rename tensors
    error = refuse(quantized, UnknownQuantization, text)
    assert "llmctl quantize" in error.fix


def test_a_bias_that_the_config_does_not_imply(plain: Path) -> None:
    change = put("model.layers.0.self_attn.q_proj.bias", torch.zeros(64))
    refuse(edit(plain, change), UnexpectedTensor, "q_proj.bias, a bias that")


@pytest.mark.parametrize("theta", ["zz", 0, -1.0, True, float("nan")])
def test_a_rope_base_that_is_no_positive_number(plain: Path, theta: Any) -> None:
    config = {"rope_theta": theta, "rope_parameters": {"rope_theta": theta}}
    refuse(configure(plain, **config), CorruptFile, "rope_theta|NaN")


def test_a_harmless_extra_tensor_is_reported(plain: Path) -> None:
    edit(plain, put("model.extra.weight", torch.zeros(3)))
    engine = plan_build(plain, BuildRequest())
    assert any("model.extra.weight" in notice for notice in engine.notices)


def test_an_existing_output_is_left_alone(plain: Path) -> None:
    (plain.parent / "engine").mkdir()
    refuse(plain, OutputExists, "engine already exists")


def test_two_builds_into_one_directory(plain: Path) -> None:
    engine = plan_build(plain, BuildRequest())
    output = plain.parent / "engine"

    def overtake(num_bytes: int) -> None:
        if not output.exists():
            run_build(engine, output)

    with pytest.raises(OutputExists):
        run_build(engine, output, overtake)
    assert (output / "config.json").is_file()
    assert not list(plain.parent.glob("*.partial")) + list(plain.parent.glob(".*.partial"))


def test_an_interrupted_build_leaves_nothing(plain: Path) -> None:
    before = sorted(plain.parent.iterdir())

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(plan_build(plain, BuildRequest()), plain.parent / "engine", interrupt)
    assert sorted(plain.parent.iterdir()) == before


def test_a_full_disk_is_noticed_before_the_first_byte(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(plain)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse(plain, OutOfDisk, "GB free")

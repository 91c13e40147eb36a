"""FP8 engines against the libraries that wrote their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import modelopt_checkpoint, relative_l2
from transformers import AutoModelForCausalLM, PreTrainedModel

MAX_RELATIVE_L2 = 1e-2  # acceptance limit against ModelOpt's fake-quantized model


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied 7 heads": (
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "hidden_size": 112,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 20}),
}


def calibration_rows(tokens: Callable[..., list[int]]) -> torch.Tensor:
    return torch.tensor(tokens(256)).view(4, 64)


@pytest.mark.parametrize("shape", SHAPES)
def test_modelopt_fp8_logits_agree_with_its_fake_quantized_model(
    shape: str, program_name: str, new_model, build_engine, open_test_engine, some_tokens, tmp_path
) -> None:
    family, fields = SHAPES[shape]
    folder, tokens = tmp_path / "fp8", some_tokens(40)
    wanted = modelopt_checkpoint(
        new_model(family, gain=0.5, **fields),
        folder,
        "FP8_DEFAULT_CFG",
        calibration_rows(some_tokens),
        True,
        tokens,
    )
    engine = open_test_engine(build_engine(folder), program_name)
    assert engine.plan.kv_cache.dtype == "float8_e4m3fn"
    assert relative_l2(engine.run(tokens), wanted) < MAX_RELATIVE_L2


def test_modelopt_per_channel_per_token_logits_agree_with_its_model(
    program_name: str, new_model, build_engine, open_test_engine, some_tokens, tmp_path
) -> None:
    folder, tokens = tmp_path / "fp8", some_tokens(40)
    rows = calibration_rows(some_tokens)
    preset = "FP8_PER_CHANNEL_PER_TOKEN_CFG"
    wanted = modelopt_checkpoint(new_model("llama", gain=0.5), folder, preset, rows, False, tokens)
    engine = open_test_engine(build_engine(folder), program_name)
    assert engine.plan.kv_cache.dtype == "float32"
    assert relative_l2(engine.run(tokens), wanted) < MAX_RELATIVE_L2


def compressed_tensors_checkpoint(
    model: PreTrainedModel, folder: Path, preset: str, rows: torch.Tensor, kv: bool
) -> None:
    """Quantize and write with the compressed-tensors library; scales from observed maxima."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    largest: dict[str, float] = {}

    def observe(name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(observe(name)) for name, module in linears]
    with torch.no_grad():
        model(rows)
    for handle in hooks:
        handle.remove()
    arguments = QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False
    )
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])},
        ignore=["lm_head"],
        kv_cache_scheme=arguments if kv else None,
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            weight, scale = module.weight.abs(), module.weight_scale
            amax = weight.max() if scale.numel() == 1 else weight.amax(1, keepdim=True)
            scale.data.copy_((amax / 448).reshape(scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(largest[name] / 448)
        for scale_name in ("k_scale", "v_scale"):
            if hasattr(module, scale_name):
                getattr(module, scale_name).data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize(
    ("preset", "kv", "tied"),
    [
        ("FP8", True, False),
        ("FP8", False, True),
        ("FP8_DYNAMIC", False, False),
        ("FP8_DYNAMIC", True, True),
    ],
)
def test_compressed_tensors_logits_agree_with_its_own_run(
    preset: str,
    kv: bool,
    tied: bool,
    program_name: str,
    new_model,
    build_engine,
    open_test_engine,
    some_tokens,
    tmp_path,
) -> None:
    folder, tokens = tmp_path / "fp8", some_tokens(40)
    model = new_model("llama", gain=0.5, tie_word_embeddings=tied)
    compressed_tensors_checkpoint(model, folder, preset, calibration_rows(some_tokens), kv)
    with torch.no_grad():
        reader = AutoModelForCausalLM.from_pretrained(folder)
        wanted = reader(torch.tensor([tokens])).logits[0]
    engine = open_test_engine(build_engine(folder), program_name)
    assert engine.plan.kv_cache.dtype == ("float8_e4m3fn" if kv else "float32")
    assert relative_l2(engine.run(tokens), wanted) < MAX_RELATIVE_L2

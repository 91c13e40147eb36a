"""What tests of cuda builds share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.attention_models import config_of
from support.random_models import make_model

# Engines have the attention of a few models, whose kernels are then compiled once for all tests.
HEADS = config_of("1b")
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
# 5 heads of 80 leave padding in the last row tile, and so does a vocabulary of 131.
WIDE = config_of("80 wide")
# With an embedding that is not tied, and sums of which eight ranks can have parts.
MODEL_OF_RANKS = {**HEADS, "hidden_size": 256, "intermediate_size": 1024}
SMALL = {"hidden_size": 144, "intermediate_size": 208}


LIMITS = {"max_batch_size": 1, "max_num_tokens": 48, "max_draft_len": 47, "max_seq_len": 96}


FP8_MAX = 448.0


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {**SMALL, **WIDE}, "none"),
    "llama tied, biases": (
        "llama",
        {**HEADS, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "none",
    ),
    "qwen2": ("qwen2", TWO_HEADS, "none"),
    "qwen3": ("qwen3", {**SMALL, **TWO_HEADS}, "none"),
    "llama fp8": ("llama", {**SMALL, **WIDE}, "static"),
    "qwen2 fp8": ("qwen2", HEADS, "static"),
    "llama fp8 rows, tokens": ("llama", {**SMALL, **TWO_HEADS}, "dynamic"),
}


# Of these CI compiles the kernels, of each the smallest: FP8 with biases and an FP8 cache.
# tests/gpu/test_builds_compiled.py compiles all of all.
COMPILED_HERE = "qwen2 fp8"


def write_case(folder: Path, case: str) -> Path:
    """The checkpoint of one of `CASES`."""
    return write_model(folder, *CASES[case])


def write_model(folder: Path, family: str, fields: dict[str, Any], quantization: str) -> Path:
    """A random model in BF16, quantized as a row of `CASES` says."""
    make_model(family, dtype="bfloat16", gain=0.5, **fields).save_pretrained(folder)
    if quantization != "none":
        quantize(folder, is_static=quantization == "static")
    return folder


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

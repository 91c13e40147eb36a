"""Checkpoints for the GPU tests: FP8 with plain scales, so that the demo models are enough."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llmctl.plugins.cuda.compiler import compile_kernel
from llmctl.plugins.cuda.driver import cuda_driver
from llmctl.plugins.cuda.kernel import Launch

_loaded: dict[str, object] = {}

INPUT_SCALE = 32 / 448  # activations of the demo models stay below 32
KV_SCALE = 16 / 448


def quantize(source: Path, folder: Path, kv_algo: str = "FP8") -> Path:
    """An FP8 checkpoint in ModelOpt's layout: per-tensor scales, FP8 or INT8 KV cache."""
    kv_scale = KV_SCALE if kv_algo == "FP8" else KV_SCALE * 448 / 127
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        scale = weight.float().abs().max() / 448
        tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[f"{module}.input_scale"] = torch.tensor(INPUT_SCALE)
        if module.endswith(("k_proj", "v_proj")):
            tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(kv_scale)
    save_file(tensors, folder / "model.safetensors")
    quantization = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": kv_algo,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    }
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    return folder


def execute(launches: Sequence[Launch]) -> None:
    """Compile what is new, run the launches in order and wait."""
    for launch in launches:
        name = launch.spec.name
        if name not in _loaded:
            _loaded[name] = cuda_driver().load(compile_kernel(launch.spec))
        stream = torch.cuda.current_stream().cuda_stream
        cuda_driver().prepare(_loaded[name], launch.grid, launch.arguments, True)(stream)
    torch.cuda.synchronize()

"""What the GPU tests share: launches, and FP8 checkpoints whose scales the demo models bear."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import SamplingScratch
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import FP8, MXFP4

_loaded: dict[str, object] = {}

INPUT_SCALE = 32 / 448  # activations of the demo models stay below 32
KV_SCALE = 16 / 448


def quantize(
    source: Path, folder: Path, kv_algo: str = "FP8", scheme: QuantizedScheme = FP8
) -> Path:
    """A quantized checkpoint in ModelOpt's layout: per-tensor scales of activations, FP8 or INT8 KV
    cache."""
    kv_scale = KV_SCALE if kv_algo == "FP8" else KV_SCALE * 448 / 127
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        stored = _QUANTIZERS[scheme.name](weight.float())
        tensors[name], tensors[f"{name}_scale"] = stored
        tensors[f"{module}.input_scale"] = torch.tensor(INPUT_SCALE)
        if module.endswith(("k_proj", "v_proj")):
            tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(kv_scale)
    save_file(tensors, folder / "model.safetensors")
    quantization = {
        "quant_algo": scheme.algo,
        "kv_cache_quant_algo": kv_algo,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    }
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    return folder


def quantize_head(source: Path, folder: Path) -> Path:
    """An FP8 draft head of one in a layout that names linears `*.weight`: its matrices but an
    embedding."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and name != "embed_tokens.weight":
            tensors[name], tensors[f"{name}_scale"] = _fp8(weight.float())
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(INPUT_SCALE)
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_algo": FP8.algo, "kv_cache_quant_algo": None, "exclude_modules": []}
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    return folder


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [out, in / 2] and powers of two uint8 [out, in / 32] (E8M0), without ModelOpt."""
    blocks = weight.view(len(weight), -1, 32)
    power = torch.ceil(torch.log2(blocks.abs().amax(2) / 6)).clamp(-100, 100)
    power = torch.maximum(power, power.amax(1, keepdim=True) - 14)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    magnitudes = torch.bucketize((blocks / 2 ** power[..., None]).abs().contiguous(), middles)
    codes = (magnitudes + 8 * (blocks < 0)).to(torch.uint8).view(len(weight), -1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, (power + 127).to(torch.uint8)


_QUANTIZERS = {FP8.name: _fp8, MXFP4.name: _mxfp4}


def execute(launches: Sequence[Launch]) -> None:
    """Compile what is new, run the launches in order and wait."""
    for launch in launches:
        name = launch.spec.name
        if name not in _loaded:
            _loaded[name] = cuda_driver().load(compile_kernel(launch.spec))
        stream = torch.cuda.current_stream().cuda_stream
        cuda_driver().prepare(_loaded[name], launch.grid, launch.arguments, True)(stream)
    torch.cuda.synchronize()


def replay(vocab: int, seconds: float) -> None:
    """Argmax of 8 rows in graphs of 500 launches, for a process of its own."""
    logits = torch.randn(8, vocab, device="cuda")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    scratch = SamplingScratch.allocate(8, vocab, "cuda")
    launch = sampling.argmax(logits, out, scratch, 8)
    loaded = cuda_driver().load(compile_kernel(launch.spec))
    run = cuda_driver().prepare(loaded, launch.grid, launch.arguments, True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(500):
            run(stream.cuda_stream)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
    assert out.tolist() == logits.argmax(1).tolist()

"""Checkpoints of MXFP4 weights for the tests of the builder, and ModelOpt's reading of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

from llmctl.builder.build import STORED, plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.quantize.layers import import_modelopt
from llmctl.quantize.plan import QuantizeOptions, plan_quantization
from llmctl.quantize.quantizer import run_quantization

MAX_RELATIVE_L2 = 1e-2  # acceptance limit against ModelOpt, as in test_fp8.py
VOCAB = 300  # with 44 rows in the last tile of the head
# K of 96, 192 and 288: less than a packed block of 256, and more with a rest of one block of 32.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
CASES = {  # name -> options of the quantization
    "plain": {},
    "head": {"quantize_lm_head": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "head, fp8 cache": {"quantize_lm_head": True, "kv_cache_dtype": "fp8"},
}
CUDA_LIMITS = {"max_batch_size": 1, "max_num_tokens": 48, "max_draft_len": 47, "max_seq_len": 96}
LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj"

Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """checkpoints(case) -> the folder that `llmctl quantize` writes; "source": what it read."""

    def __init__(self, root: Path, new_model: Callable[..., PreTrainedModel]) -> None:
        self._root = root
        self._new_model = new_model

    def __call__(self, case: str) -> Path:
        folder = self._root / case.replace(", ", "-").replace(" ", "-")
        if folder.exists():
            return folder
        if case == "source":
            self._new_model("llama", gain=0.5, **SHAPE).save_pretrained(folder)
            write_tokenizer(folder)
        else:
            options = QuantizeOptions(
                self("source"),
                folder,
                qformat="w4a8_mxfp4_fp8",
                calib_size=4,
                calib_max_seq_length=64,
                **CASES[case],
            )
            run_quantization(plan_quantization(options))
        return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes, each a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def modelopt_weight(stored: Tensors, module: str) -> torch.Tensor:
    """float32 [rows, K]: what ModelOpt reads the codes and powers of a linear as."""
    import_modelopt()  # a direct import warns about versions
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    codes, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
    shape = torch.Size((len(codes), 2 * codes.shape[1]))
    tensor = MXFP4QTensor(shape, torch.float32, codes)
    return tensor.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})


def parts_of(name: str) -> list[str]:
    """The checkpoint modules that a linear of the engine merges."""
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    prefix, _, last = name.rpartition(".")
    return [f"{prefix}.{part}" for part in merged[last]] if last in merged else [name]


def plan_cuda(folder: Path, load_format: LoadFormat = STORED, **limits: int) -> EnginePlan:
    """The plan of a cuda engine, without its kernels."""
    return plan_build(
        folder,
        BuildRequest(**(CUDA_LIMITS | limits), dtype="bfloat16"),
        backend="cuda",
        compute_capability="9.0",
        load_format=load_format,
        with_binaries=False,
    )


def values_of(engine: EnginePlan, name: str) -> torch.Tensor:
    """A weight as the engine file would hold it."""
    return torch.cat(list(engine.sources[name].chunks(engine.checkpoint)))

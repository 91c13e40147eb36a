"""The heads and caches for which tests compile attention kernels.

Tests that look at machine code and engines that tests build take them from here: a kernel for which
several ask is compiled once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.attention import FP8, INT8, World

# Query heads, KV heads, head size: of Llama 3, of Qwen2.5 0.5B, whose groups of 7 are no power of
# two, and of no model.
HEADS = {
    "70b": (64, 8, 128),
    "8b": (32, 8, 128),
    "3b": (24, 8, 128),
    "1b": (32, 8, 64),
    "0.5b": (14, 2, 64),
    "80 wide": (3, 1, 80),
    "96 wide": (8, 1, 96),
}
OF_SIZE = {64: "1b", 128: "70b"}
# The model's type, that of keys and values, and whether the output is quantized, as engines with
# FP8 weights do.
CACHES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "float16": (torch.float16, torch.float16, False),
    "fp8": (torch.bfloat16, FP8, True),
    "fp8 of float16": (torch.float16, FP8, True),
    "int8": (torch.bfloat16, INT8, True),
    "int8 of float16": (torch.float16, INT8, False),
}


def world_of(heads: str, cache: str, **fields: Any) -> World:
    """A world with the heads of `HEADS` and a cache of `CACHES`: one short request, of an engine
    whose steps reach all kernels but those for longer contexts."""
    dtype, kv_dtype, quantizes = CACHES[cache]
    fields = {"max_seq_len": 4096, **fields}
    return World(*HEADS[heads], (64,), dtype, kv_dtype, quantizes, **fields)


def config_of(heads: str, ranks: int = 1) -> dict[str, int]:
    """The fields of a model's config.json that give it, or each of its ranks, these heads."""
    query_heads, kv_heads, size = HEADS[heads]
    return {
        "num_attention_heads": ranks * query_heads,
        "num_key_value_heads": ranks * kv_heads,
        "head_dim": size,
    }


def give_heads(checkpoint: Path, heads: str, ranks: int = 1) -> None:
    """Edit the config.json of a checkpoint without weights so."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config_of(heads, ranks)))

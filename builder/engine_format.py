"""The engine directory: config.json and rank{N}.engine, written once and read by the runtime.

An engine file is one safetensors container. Its header metadata holds the plan as JSON; its
tensors hold packed weights, rotary tables and compiled kernels. Nothing is pickled and everything
can be mapped into memory. This module is the only one of `builder` that `runtime` imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Dim = int | str  # "tokens": rows of the packed step; "rows": rows that get logits


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """A value of the plan. dtype is torch's name: float32, bfloat16, float16, float8_e4m3fn, int32.

    Weights live in the engine file under `name`; activations live in one arena at `offset` bytes,
    sized for max_num_tokens (and max_num_rows), and share space when their lifetimes allow.
    """

    name: str
    kind: Literal["weight", "activation"]
    dtype: str
    shape: tuple[Dim, ...]
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class PlanOp:
    """One kernel launch: `op` names a folder of `plugins/`, roles map to tensor names."""

    op: str
    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    tactic: str = ""  # the kernel chosen at build, e.g. "cpu.linear.fp8"


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The paged cache: [num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size].

    `windows` has one entry a layer: the attention window in tokens, 0 for full attention.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int
    dtype: str
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an executable runs each step, in order. `logits` is [rows, vocab_size] float32."""

    tensors: tuple[PlanTensor, ...]
    ops: tuple[PlanOp, ...]
    kv_cache: KvCacheSpec
    logits: str
    arena_bytes: int
    max_num_tokens: int
    max_num_rows: int

    def to_json(self) -> str:
        """The plan as strict JSON (no NaN)."""
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`. Raises KeyError/TypeError on foreign content."""
        raw: dict[str, Any] = json.loads(text)
        tensors = tuple(PlanTensor(**{**t, "shape": tuple(t["shape"])}) for t in raw.pop("tensors"))
        ops = tuple(PlanOp(**op) for op in raw.pop("ops"))
        cache = raw.pop("kv_cache")
        spec = KvCacheSpec(**{**cache, "windows": tuple(cache["windows"])})
        return Plan(tensors=tensors, ops=ops, kv_cache=spec, **raw)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """config.json of an engine directory, readable before any weight is touched."""

    version: int  # SCHEMA_VERSION of the writer
    backend: str  # cpu | cuda | tensorrt | tensorrt-rtx
    pretrained_config: Mapping[str, Any]
    build_config: Mapping[str, Any]
    plugin_config: Mapping[str, Any]
    source: Mapping[str, Any]  # checkpoint path, file hashes
    tokenizer: Mapping[str, Any]  # files, hash of their content, vocab_size
    versions: Mapping[str, str]  # llmctl, torch, python, ...
    command: str

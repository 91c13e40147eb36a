"""The engine directory: config.json and rank{N}.engine, written once and read by the runtime.

An engine file is one safetensors container. Its header metadata holds the plan as JSON; its
tensors hold packed weights, rotary tables and compiled kernels. Nothing is pickled and everything
can be mapped into memory. This module is the only one of `builder` that `runtime` imports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmctl.builder.container import (
    DTYPES,
    Entry,
    corrupt,
    encode_header,
    layout,
    map_container,
    read_container_header,
    write_container,
)
from llmctl.errors import CorruptEngine, EngineNotFound, RebuildNeeded

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 2
CONFIG_FILE = "config.json"
TOKENIZER_FOLDER = "tokenizer"

# "tokens": rows of the packed step; "rows": rows that get logits
Dim = int | str
TENSORRT_OP = "tensorrt"  # an operator of a plan that runs one of its `trt_pieces`


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """A value of the plan. dtype is torch's name: float32, bfloat16, float16, float8_e4m3fn, int32.

    Weights live in the engine file under `name`, unless the engine says how to generate them
    (`EngineConfig.weights`) and `is_stored` is false. Activations live in one arena at `offset`
    bytes, sized for max_num_tokens (and max_num_rows), and share space when their lifetimes allow.
    """

    name: str
    kind: Literal["weight", "activation"]
    dtype: str
    shape: tuple[Dim, ...]
    offset: int | None = None
    is_stored: bool = True


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
class PlanKernel:
    """One compiled kernel. Its cubin is the engine file's uint8 tensor `tensor`.

    `metadata` is that of `plugins.cuda.compiler.CompiledKernel`: how to launch it, what it uses.
    `capability` says for which GPU, where an engine serves several.
    """

    name: str
    num_bytes: int
    metadata: Mapping[str, Any]
    capability: str = ""

    @property
    def tensor(self) -> str:
        """The name of the cubin in the engine file."""
        return f"kernel:{self.capability}:{self.name}" if self.capability else f"kernel:{self.name}"


@dataclass(frozen=True, slots=True)
class TrtPiece:
    """One plan of TensorRT. Its bytes are the engine file's uint8 tensor `tensor`.

    bindings: {name, is_input, dtype, shape, alias} of each; an alias names the input whose memory
    an output shares. profiles: {name, sizes: {dimension: [least, tuned for, most]}, layers,
    activation_bytes, scratch_bytes} of each optimization profile, as the builder reported them.
    """

    name: str
    num_bytes: int
    package: str  # the import name of the package that built it
    version: str
    bindings: tuple[Mapping[str, Any], ...]
    profiles: tuple[Mapping[str, Any], ...]

    @property
    def tensor(self) -> str:
        """The name of the plan in the engine file."""
        return f"plan:{self.name}"


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
    kernels: tuple[PlanKernel, ...] = ()  # cuda: every binary that a step or a round may launch
    scratch_bytes: int = 0  # cuda: what kernels ask of `LaunchEnv.scratch`, at most
    trt_pieces: tuple[TrtPiece, ...] = ()  # tensorrt: what its operators "tensorrt" run

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
        kernels = tuple(PlanKernel(**kernel) for kernel in raw.pop("kernels"))
        pieces = tuple(
            TrtPiece(**{**p, "bindings": tuple(p["bindings"]), "profiles": tuple(p["profiles"])})
            for p in raw.pop("trt_pieces", ())  # absent: an engine of before there were any
        )
        return Plan(tensors, ops, spec, kernels=kernels, trt_pieces=pieces, **raw)


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
    files: Mapping[str, Any] = field(default_factory=dict)  # engine file -> bytes, header_sha256
    # what kernels and plans are compiled for, commas between several; None: nothing is
    compute_capability: str | None = None
    # load_format: auto (stored in the file), or dummy or planted and what they are generated from
    weights: Mapping[str, Any] = field(default_factory=lambda: {"load_format": "auto"})

    def to_json(self) -> str:
        """The document as stored: strict JSON, indented for people."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def engine_file(rank: int) -> str:
    """The name of one rank's engine file."""
    return f"rank{rank}.engine"


def plan_entries(plan: Plan) -> list[Entry]:
    """The tensors that the plan's engine file holds: stored weights, cubins, TensorRT's plans."""
    entries = []
    for tensor in plan.tensors:
        if tensor.kind == "weight" and tensor.is_stored:
            shape = tuple(dim for dim in tensor.shape if isinstance(dim, int))
            assert len(shape) == len(tensor.shape), f"the shape of weight {tensor.name} is symbolic"
            entries.append(Entry(tensor.name, tensor.dtype, shape))
    binaries = (*plan.kernels, *plan.trt_pieces)
    entries += [Entry(binary.tensor, "uint8", (binary.num_bytes,)) for binary in binaries]
    return entries


def weight_bytes(plan: Plan) -> int:
    """Bytes of all weights, stored and generated ones."""
    weights = [t for t in plan.tensors if t.kind == "weight"]
    return sum(math.prod(map(int, t.shape)) * DTYPES[t.dtype][1] for t in weights)


def kv_bytes_per_token(plan: Plan) -> int:
    """Bytes of KV cache one token takes over all layers."""
    cache = plan.kv_cache
    entries = 2 * cache.num_layers * cache.num_kv_heads * cache.head_size
    return entries * DTYPES[cache.dtype][1]


def engine_bytes(plan: Plan) -> int:
    """The size the engine file will have."""
    entries = layout(plan_entries(plan))
    return len(encode_header(entries, _metadata(plan))) + sum(e.num_bytes for e in entries)


def write_engine(
    folder: Path,
    plan: Plan,
    chunks: Callable[[str], Iterator[torch.Tensor]],
    on_progress: Callable[[int], None],
    rank: int = 0,
) -> dict[str, Any]:
    """Write one engine file; returns its record for `EngineConfig.files`.

    chunks(name) yields the values of a weight, cubin or plan in order. Nothing is held but the
    current chunk.
    """
    name = engine_file(rank)
    num_bytes, digest = write_container(
        folder / name, plan_entries(plan), _metadata(plan), chunks, on_progress
    )
    return {name: {"bytes": num_bytes, "header_sha256": digest}}


def read_engine_config(folder: Path) -> EngineConfig:
    """config.json of an engine directory.

    Raises EngineNotFound, CorruptEngine, or RebuildNeeded for another schema version.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise EngineNotFound(
            f"{folder} is not an engine directory: it has no {CONFIG_FILE}",
            fix=f"llmctl build --checkpoint-dir CHECKPOINT --output-dir {folder}",
        )
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptEngine(
            f"{path} is not valid JSON: {error}", fix="build the engine again"
        ) from error
    if not isinstance(raw, dict) or not {"version", "build_config"} <= set(raw):
        raise EngineNotFound(
            f"{path} is not the config of an engine (a checkpoint folder has one of that name)",
            fix="give the directory that `llmctl build` wrote",
        )
    if raw["version"] != SCHEMA_VERSION:
        raise RebuildNeeded(
            f"{folder} has engine schema {raw['version']!r}; this llmctl reads {SCHEMA_VERSION}",
            fix=f"remove it and build again: {raw.get('command') or 'llmctl build'}",
        )
    names = {f.name for f in fields(EngineConfig)}
    if set(raw) != names:
        odd = sorted(set(raw) ^ names)[0]
        raise CorruptEngine(
            f"{path} {'has an unknown' if odd in raw else 'lacks the'} field {odd!r}",
            fix="build the engine again",
        )
    for name in (f.name for f in fields(EngineConfig) if str(f.type).startswith("Mapping")):
        if not isinstance(raw[name], dict):
            raise CorruptEngine(f"{path}: {name} is not an object", fix="build the engine again")
    return EngineConfig(**raw)


def read_plan(folder: Path, rank: int = 0) -> Plan:
    """The plan of one rank, from the header of its engine file; no tensor is touched.

    Raises what `read_engine_config` raises, and CorruptEngine for a file that is truncated or
    contradicts config.json.
    """
    return _read_header(folder, rank)[0]


def open_engine(folder: Path, rank: int = 0) -> tuple[Plan, dict[str, torch.Tensor]]:
    """(plan, stored tensors by name: weights, and cubins by `PlanKernel.tensor`) of one rank.

    Tensors are views of a private map of the file. Weights that are not stored are absent.

    Raises what `read_plan` raises, and CorruptEngine for a file that contradicts its plan.
    """
    plan, header, data_start = _read_header(folder, rank)
    path = folder / engine_file(rank)
    tensors = map_container(path, header, data_start)
    for entry in plan_entries(plan):
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise corrupt(path, f"its plan needs {entry.name}, which is not there")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise corrupt(
                path, f"{entry.name} is {dtype} {list(tensor.shape)}, its plan says {entry}"
            )
    return plan, tensors


def _read_header(folder: Path, rank: int) -> tuple[Plan, dict[str, Any], int]:
    """(plan, the header's entries, where the data starts in bytes)."""
    config = read_engine_config(folder)
    path = folder / engine_file(rank)
    if not path.is_file():
        raise EngineNotFound(f"{path} does not exist", fix="build the engine again")
    raw, header = read_container_header(path)
    record = config.files.get(path.name)
    found = {"bytes": path.stat().st_size, "header_sha256": sha256(raw).hexdigest()}
    if record != found:
        raise corrupt(path, f"{CONFIG_FILE} describes {record}, the file is {found}")
    try:
        plan = Plan.from_json(header["__metadata__"]["plan"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise corrupt(path, f"it holds no readable plan: {error}") from error
    return plan, header, len(raw)


def _metadata(plan: Plan) -> dict[str, str]:
    return {"format": "llmctl", "schema_version": str(SCHEMA_VERSION), "plan": plan.to_json()}

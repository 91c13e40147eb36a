"""The engine directory: config.json and rank{N}.engine, written once and read by the runtime.

An engine file is one safetensors container. Its header metadata holds the plan as JSON; its
tensors hold packed weights, compiled kernels and plans of TensorRT. Nothing is
pickled and everything can be mapped into memory. This module is the only one of `builder` that
`runtime` imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.container import (
    Entry,
    check_entries,
    corrupt,
    encode_header,
    layout,
    map_container,
    read_container_header,
    write_container,
)
from llmctl.builder.heads.eagle.names import CACHE as EAGLE_CACHE
from llmctl.builder.heads.eagle.names import EXTEND as EAGLE_EXTEND
from llmctl.builder.heads.eagle.names import FEATURES as EAGLE_FEATURES
from llmctl.builder.heads.eagle.names import NEXT as EAGLE_NEXT
from llmctl.builder.heads.eagle.names import STATE as EAGLE_STATE
from llmctl.builder.heads.eagle.names import feature_inputs as eagle_inputs
from llmctl.builder.heads.eagle.names import tap_name as eagle_tap
from llmctl.builder.heads.lookahead.config import LookaheadDecodingConfig
from llmctl.builder.heads.medusa.tree import GRAPH as MEDUSA_GRAPH
from llmctl.builder.heads.medusa.tree import TOP_K, MedusaTree, parse_choices
from llmctl.builder.heads.medusa.tree import logits_name as medusa_logits
from llmctl.builder.heads.redrafter.names import FIRST as REDRAFTER_FIRST
from llmctl.builder.heads.redrafter.names import NEXT as REDRAFTER_NEXT
from llmctl.builder.heads.redrafter.names import STATES as REDRAFTER_STATES
from llmctl.builder.plan import (
    BASE,
    TENSORRT_OP,
    Dim,
    KvCacheSpec,
    Plan,
    PlanGraph,
    PlanKernel,
    PlanOp,
    PlanTensor,
    TrtPiece,
    kv_bytes_per_token,
    trt_memory_bytes,
    weight_bytes,
)
from llmctl.builder.ranks import engine_file
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.builder.step_limits import step_limits
from llmctl.builder.validation import strict_json
from llmctl.builder.validation.config import find_wrong_field
from llmctl.builder.validation.plan import check_plan
from llmctl.errors import CorruptEngine, EngineNotFound, RebuildNeeded
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    import torch

__all__ = [
    "BASE",
    "CONFIG_FILE",
    "Dim",
    "EAGLE_CACHE",
    "EAGLE_EXTEND",
    "EAGLE_FEATURES",
    "EAGLE_NEXT",
    "EAGLE_STATE",
    "EngineConfig",
    "SPECULATIVE_MODES",
    "KvCacheSpec",
    "LookaheadDecodingConfig",
    "MEDUSA_GRAPH",
    "MedusaTree",
    "Plan",
    "PlanGraph",
    "PlanKernel",
    "PlanOp",
    "PlanTensor",
    "REDRAFTER_FIRST",
    "REDRAFTER_NEXT",
    "REDRAFTER_STATES",
    "SCHEMA_VERSION",
    "TENSORRT_OP",
    "TOP_K",
    "TOKENIZER_FOLDER",
    "TrtPiece",
    "config_path",
    "eagle_inputs",
    "eagle_tap",
    "engine_bytes",
    "engine_file",
    "kv_bytes_per_token",
    "medusa_logits",
    "open_engine",
    "parse_choices",
    "plan_entries",
    "read_engine_config",
    "read_plan",
    "step_limits",
    "trt_memory_bytes",
    "weight_bytes",
    "write_engine",
]

SCHEMA_VERSION = 11
CONFIG_FILE = "config.json"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """config.json of an engine directory, readable before any weight is read."""

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

    @property
    def num_ranks(self) -> int:
        """Ranks that run the engine together."""
        return int(self.build_config.get("tp_size", 1))

    def to_json(self) -> str:
        """The document as stored: strict JSON, indented for people."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def plan_entries(plan: Plan) -> list[Entry]:
    """The tensors that the plan's engine file holds: stored weights, cubins, TensorRT's plans."""
    entries = []
    for tensor in plan.tensors:
        if tensor.kind == "weight" and tensor.is_stored:
            shape = tuple(dim for dim in tensor.shape if isinstance(dim, int))
            assert len(shape) == len(tensor.shape), f"the shape of weight {tensor.name} is symbolic"
            entries.append(Entry(tensor.name, tensor.dtype, shape))
    binaries: tuple[PlanKernel | TrtPiece, ...] = (*plan.kernels, *plan.trt_pieces)
    entries += [Entry(binary.tensor, "uint8", (binary.num_bytes,)) for binary in binaries]
    return entries


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


def config_path(folder: Path) -> Path:
    """The config.json of an engine directory. Raises EngineNotFound where there is none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise EngineNotFound(
            f"{folder} is not an engine directory: it has no {CONFIG_FILE}",
            fix=f"llmctl build --checkpoint-dir CHECKPOINT --output-dir {folder}",
        )
    return path


def read_engine_config(folder: Path) -> EngineConfig:
    """config.json of an engine directory.

    Raises EngineNotFound, CorruptEngine, or RebuildNeeded for another schema version.
    """
    path = config_path(folder)
    try:
        raw = strict_json.parse(path.read_bytes())
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
    if raw["backend"] not in tuple(BACKENDS):  # of any type
        raise CorruptEngine(
            f"{path} names the backend {raw['backend']!r}; known: {', '.join(BACKENDS)}",
            fix="build the engine again",
        )
    wrong = find_wrong_field(raw)
    if wrong is not None:
        raise CorruptEngine(f"{path}: {wrong}", fix="build the engine again")
    return EngineConfig(**raw)


def read_plan(folder: Path, rank: int = 0) -> Plan:
    """The plan of one rank, from the header of its engine file; no tensor is touched.

    Raises what `read_engine_config` raises, and CorruptEngine for a file that is truncated or
    contradicts config.json, and for a plan that is not one that `build` writes (`validation`).
    """
    return _read_header(folder, rank)[1]


def open_engine(folder: Path, rank: int = 0) -> tuple[Plan, dict[str, torch.Tensor]]:
    """(plan, stored tensors by name: weights, and cubins by `PlanKernel.tensor`) of one rank.

    Tensors are views of a private map of the file. Weights that are not stored are absent.

    Raises what `read_plan` raises, and CorruptEngine for kernels that are not those of the plan.
    """
    from llmctl.builder.validation.kernels import check_kernels

    config, plan, header, data_start = _read_header(folder, rank)
    path = folder / engine_file(rank)
    tensors = map_container(path, header, data_start)
    with _naming(path):
        check_kernels(config, plan, tensors)
    return plan, tensors


def _read_header(folder: Path, rank: int) -> tuple[EngineConfig, Plan, dict[str, Any], int]:
    """Returns (config.json, the plan, the header's entries, where the data starts in bytes)."""
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
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise corrupt(path, f"it holds no readable plan: {error}") from error
    with _naming(path):
        check_plan(config, plan)
        check_entries(header, plan_entries(plan))
    return config, plan, header, len(raw)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file it is that is not valid."""
    try:
        yield
    except CorruptEngine as error:
        raise CorruptEngine(f"{path}: {error}", fix=error.fix) from error


def _metadata(plan: Plan) -> dict[str, str]:
    return {"format": "llmctl", "schema_version": str(SCHEMA_VERSION), "plan": plan.to_json()}

"""The engine directory: config.json and rank{N}.engine, written once and read by the runtime.

An engine file is one safetensors container. Its header metadata holds the plan as JSON; its
tensors hold packed weights, compiled kernels and plans of TensorRT. Nothing is
pickled and everything can be mapped into memory. `runtime` imports this module of `builder`, and
for signatures `signature.py` and `signing_keys.py`, but no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.container import (
    Entry,
    byte_ranges,
    check_entries,
    corrupt,
    encode_header,
    layout,
    map_container,
    read_container_header,
    write_container,
)
from llmctl.builder.engine_config import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    EngineConfig,
    config_path,
    read_engine_config,
    require_file,
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
    weight_sizes,
)
from llmctl.builder.ranks import engine_file
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.builder.step_limits import step_limits
from llmctl.builder.validation.plan import check_plan
from llmctl.errors import CorruptEngine, EngineNotFound

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
    "read_ranges",
    "step_limits",
    "trt_memory_bytes",
    "weight_bytes",
    "weight_sizes",
    "write_engine",
]

TOKENIZER_FOLDER = "tokenizer"
_FORMAT = {"format": "llmctl", "schema_version": str(SCHEMA_VERSION)}  # of an engine file's header


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
    return len(encode_header(entries, metadata_of(plan))) + sum(e.num_bytes for e in entries)


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
        folder / name, plan_entries(plan), metadata_of(plan), chunks, on_progress
    )
    return {name: {"bytes": num_bytes, "header_sha256": digest}}


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


def read_ranges(folder: Path, rank: int = 0) -> tuple[Plan, dict[str, tuple[int, int]]]:
    """(the plan, which bytes of one rank's file each tensor is); imports no torch.

    Raises what `read_plan` raises.
    """
    _, plan, header, data_start = _read_header(folder, rank)
    return plan, byte_ranges(header, data_start)


def require_rank_files(folder: Path, num_ranks: int) -> None:
    """Raise EngineNotFound where a rank's file is missing: a rank would find that only when others
    wait for it."""
    for rank in range(num_ranks):
        _rank_path(folder, rank)


def _rank_path(folder: Path, rank: int) -> Path:
    path = folder / engine_file(rank)
    require_file(path)
    if not path.is_file():
        raise EngineNotFound(f"{path} does not exist", fix="build the engine again")
    return path


def _read_header(folder: Path, rank: int) -> tuple[EngineConfig, Plan, dict[str, Any], int]:
    """Returns (config.json, the plan, the header's entries, where the data starts in bytes)."""
    config = read_engine_config(folder)
    path = _rank_path(folder, rank)
    raw, header = read_container_header(path)
    record = config.files.get(path.name)
    found = {"bytes": path.stat().st_size, "header_sha256": sha256(raw).hexdigest()}
    for key, value in found.items():
        wanted = (record or {}).get(key)
        if value != wanted:
            raise corrupt(path, f"{CONFIG_FILE} says {key} {wanted}, the file has {value}")
    try:
        metadata = header["__metadata__"]
        for key, text in _FORMAT.items():
            if metadata[key] != text:
                raise ValueError(f"its {key} is {metadata[key]!r}, {text!r} is wanted")
        plan = Plan.from_json(metadata["plan"])
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


def metadata_of(plan: Plan) -> dict[str, str]:
    """What its engine file's header holds besides tensors."""
    return {**_FORMAT, "plan": plan.to_json()}

"""`llmctl inspect`: what an engine directory holds, from its config and header; no weight is read.

The plan is shown as the operators of one layer for all layers that are alike, so an engine of 80
layers fits a screen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import EngineNotFound, Unsupported

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, Plan, PlanOp, PlanTensor

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def describe_engine(folder: Path) -> dict[str, Any]:
    """The object that `--json` prints.

    Raises EngineNotFound, CorruptEngine, RebuildNeeded, and Unsupported for a checkpoint folder.
    """
    from llmctl.builder.engine_format import read_engine_config, read_plan

    _refuse_checkpoint(folder)
    config, plan = read_engine_config(folder), read_plan(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    fields = asdict(config)
    del fields["files"]  # sizes on disk are shown instead; `read_plan` has compared the two
    return {
        "path": str(folder),
        "config": fields,
        "memory": _memory(config, plan),
        "layers": list(_layers(plan)),
        "kernels": [
            {"name": kernel.name, "num_bytes": kernel.num_bytes, **_resources(kernel.metadata)}
            for kernel in plan.kernels
        ],
        "files": [
            {"name": str(file.relative_to(folder)), "bytes": file.stat().st_size} for file in files
        ],
    }


def _refuse_checkpoint(folder: Path) -> None:
    """A folder with weights in safetensors files is a checkpoint. Raises Unsupported."""
    if not folder.is_dir():
        raise EngineNotFound(f"{folder} is not a directory", fix="give an engine directory")
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        raise Unsupported(
            f"{folder} is a checkpoint (it has {weights[0].name}); inspect reads engines",
            fix=f"llmctl build --dry-run --checkpoint-dir {folder}",
        )


def _memory(config: EngineConfig, plan: Plan) -> dict[str, int]:
    from llmctl.builder.engine_format import kv_bytes_per_token, weight_bytes

    per_token, build = kv_bytes_per_token(plan), config.build_config
    return {
        "weight_bytes": weight_bytes(plan),
        "activation_bytes": plan.arena_bytes,
        "scratch_bytes": plan.scratch_bytes,
        "kernel_bytes": sum(kernel.num_bytes for kernel in plan.kernels),
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_block": per_token * plan.kv_cache.tokens_per_block,
        "kv_bytes_per_sequence": per_token * int(build["max_seq_len"]),
    }


def _resources(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = ("entry", "registers", "threads", "shared_bytes", "local_bytes", "cluster")
    return {name: metadata[name] for name in names}


# ---- the plan, layer by layer ----


def _layers(plan: Plan) -> Iterator[dict[str, Any]]:
    """Groups of layers whose operators are alike, in order of their first; [] is outside layers."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    groups: dict[str, dict[str, Any]] = {}
    for layer, ops in _split(plan.ops):
        rows = [_describe(op, tensors) for op in ops]
        key = json.dumps(rows)
        group = groups.setdefault(key, {"layers": [], "ops": rows})
        group["layers"] += [] if layer is None else [layer]
    yield from groups.values()


def _split(ops: Sequence[PlanOp]) -> Iterator[tuple[int | None, list[PlanOp]]]:
    """(layer, its operators) in order. A layer starts with the first operator named after it and
    ends where the next one starts: operators named otherwise were moved into it."""
    found = [_LAYER.search(op.name) for op in ops]
    end = max(index for index, match in enumerate(found) if match) + 1
    current: int | None = None
    part: list[PlanOp] = []
    for index, (op, match) in enumerate(zip(ops, found, strict=True)):
        layer = current if index < end else None
        if match:
            layer = max(int(match[1]), current or 0)
        if layer != current and part:
            yield current, part
            part = []
        current = layer
        part.append(op)
    yield current, part


def _describe(op: PlanOp, tensors: Mapping[str, PlanTensor]) -> dict[str, Any]:
    """One operator as JSON values, equal for operators that differ only in their layer."""
    weights = [tensors[name] for name in op.inputs.values() if tensors[name].kind == "weight"]
    return {
        "op": op.op,
        "name": _LAYER.sub(".layers.N.", op.name),
        "tactic": op.tactic,
        "inputs": {role: _tensor(tensors[name]) for role, name in op.inputs.items()},
        "outputs": {role: _tensor(tensors[name]) for role, name in op.outputs.items()},
        "attributes": {name: value for name, value in op.attributes.items() if name != "layer"},
        "weight_bytes": sum(map(_num_bytes, weights)),  # of all it reads, shared ones included
    }


def _tensor(tensor: PlanTensor) -> dict[str, Any]:
    return {"kind": tensor.kind, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def _num_bytes(weight: PlanTensor) -> int:
    from llmctl.builder.container import DTYPES

    return math.prod(map(int, weight.shape)) * DTYPES[weight.dtype][1]

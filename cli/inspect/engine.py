"""`llmctl inspect` of an engine: its config and the header of its file; no weight is read.

The plan is shown as the operators of one layer for all layers that are alike, so an engine of 80
layers fits a screen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmctl.builder.container import DTYPES
from llmctl.builder.engine_format import (
    EngineConfig,
    Plan,
    PlanOp,
    PlanTensor,
    kv_bytes_per_token,
    read_engine_config,
    read_plan,
    weight_bytes,
)
from llmctl.builder.signature import describe_signature
from llmctl.cli.gpus import Gpu
from llmctl.cli.inspect.by_ranks import steps_by_ranks
from llmctl.cli.inspect.cost import DECODE, Step, fused, op_bytes
from llmctl.cli.inspect.prediction import find_device, predict_head, predict_step
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def describe_engine(
    folder: Path, step: Step = DECODE, gpu: str | None = None, read_gb_s: float | None = None
) -> dict[str, Any]:
    """The object that `--json` prints. gpu, or read_gb_s in GB/s: what times are predicted for.

    Raises EngineNotFound, CorruptEngine, RebuildNeeded; BadConfig for an unknown GPU, or one for an
    engine that runs on none.
    """
    config = read_engine_config(folder)
    # config.json was checked to say one header of all; that the files have it is asked here.
    plan, *_ = (read_plan(folder, rank) for rank in range(config.num_ranks))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    fields = asdict(config)
    del fields["files"]  # sizes on disk are shown instead; `read_plan` has compared the two
    step = Step(step.tokens, min(step.context_len, int(config.build_config["max_seq_len"])))
    predicted = predict_step(config, plan, step, gpu, read_gb_s)
    device = find_device(config, gpu, read_gb_s)
    steps = {} if device is None else steps_by_ranks(config, plan, step, device)
    return {
        "path": str(folder),
        "config": fields,
        "signature": describe_signature(folder),
        "ranks": _ranks(config, plan)
        | {"step_ms": {count: [1e3 * bound for bound in found] for count, found in steps.items()}},
        "memory": _memory(config, plan),
        "rotary_tables": list(_rotary_tables(plan)),
        "has_fp8_context": plan.fp8_tokens is not Fp8Tokens.NONE,
        "has_fp8_generation": plan.fp8_tokens is Fp8Tokens.ALL,
        "step": predicted,
        "outputs": dict(plan.outputs),
        "fused": [asdict(each) for each in plan.fused],
        "layers": list(describe_layers(plan, step, predicted["read_bytes_s"])),
        "heads": [
            each | {"step": _head_step(config, plan, each["name"], device)}
            for each in describe_heads(plan, step, predicted["read_bytes_s"])
        ],
        "kernels": [
            {
                "name": kernel.name,
                "capability": kernel.capability,  # empty: the engine has one
                "num_bytes": kernel.num_bytes,
                **_resources(kernel.metadata),
            }
            for kernel in plan.kernels
        ],
        "trt_pieces": [asdict(piece) for piece in plan.trt_pieces],
        "files": [
            {"name": str(file.relative_to(folder)), "bytes": file.stat().st_size} for file in files
        ],
    }


def _memory(config: EngineConfig, plan: Plan) -> dict[str, int]:
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


def _rotary_tables(plan: Plan) -> Iterator[dict[str, Any]]:
    """What loading the engine computes, as its weights count it but its file does not."""
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors if tensor.name in plan.rotary}
    for name, found in plan.rotary.items():
        positions, head_size = (int(size) for size in shapes[name])
        yield {
            "name": name,
            "positions": positions,
            "head_size": head_size,
            "bytes": 4 * positions * head_size,
            "least_frequency": min(found.frequencies),
            "factor": found.factor,
        }


def _ranks(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """How many ranks there are, and what each has of the model; all else here is of one of them."""
    count = config.num_ranks
    model = config.pretrained_config
    return {
        "count": count,
        "num_heads": int(model["num_attention_heads"]) // count,
        "num_kv_heads": plan.kv_cache.num_kv_heads,
        "is_invariant": config.build_config.get("sum_leaves", 1) > 1,
    }


def _resources(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = ("entry", "registers", "threads", "shared_bytes", "local_bytes", "cluster")
    return {name: metadata[name] for name in names}


# ---- the plan, layer by layer ----


def describe_layers(
    plan: Plan, step: Step = DECODE, read_bytes_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Groups of layers whose operators are alike, in order of their first; [] is outside layers."""
    describe = _describer(plan, step, read_bytes_s)
    groups: dict[str, dict[str, Any]] = {}
    for layer, ops in _split(plan.ops):
        rows = [describe(op, layer) for op in ops]
        key = json.dumps(rows)
        group = groups.setdefault(key, {"layers": [], "ops": rows})
        group["layers"] += [] if layer is None else [layer]
    yield from groups.values()


def _head_step(config: EngineConfig, plan: Plan, name: str, gpu: Gpu | None) -> dict[str, Any]:
    found = predict_head(config, plan, name, gpu)
    return {
        "read_bytes": found.read_bytes,
        "predicted_ms": found.bounds_s and [1e3 * bound for bound in found.bounds_s],
        "num_meetings": found.num_meetings,
    }


def describe_heads(
    plan: Plan, step: Step = DECODE, read_bytes_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """The graphs beside the base graph: where each input comes from ("base.hidden", or "given" by
    whoever runs the head), its outputs, and its operators as those of layers."""
    describe = _describer(plan, step, read_bytes_s)
    computed = {
        tensor: f"{graph}.{output}"
        for graph, found in plan.graphs.items()
        for output, tensor in found.outputs.items()
    }
    for name, head in plan.heads.items():
        yield {
            "name": name,
            "inputs": {role: computed.get(t, "given") for role, t in head.inputs.items()},
            "outputs": list(head.outputs),
            "ops": [describe(op, None) for op in head.ops],
        }


def _describer(
    plan: Plan, step: Step, read_bytes_s: float | None
) -> Callable[[PlanOp, int | None], dict[str, Any]]:
    """Describes operators of the plan, each with its layer."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    ops = [op for graph in plan.graphs.values() for op in graph.ops]
    producers = {tensor: op.name for op in ops for tensor in op.outputs.values()}
    return lambda op, layer: (
        _describe(op, layer, tensors)
        | _cost(op, tensors, plan, step, read_bytes_s)
        | {"producers": _producers(op, producers, layer)}
    )


def _producers(op: PlanOp, producers: Mapping[str, str], layer: int | None) -> dict[str, str]:
    """role -> the operator that wrote it, by a name that is equal in layers that are alike."""
    return {
        role: _relative(producers[tensor], layer)
        for role, tensor in op.inputs.items()
        if tensor in producers
    }


def _relative(name: str, layer: int | None) -> str:
    """A name with its layer as N, or as N-1 where it belongs to the one before `layer`."""
    found = _LAYER.search(name)
    if found is None:
        return name
    is_before = layer is not None and int(found[1]) == layer - 1
    return _LAYER.sub(".layers.N-1." if is_before else ".layers.N.", name)


def _cost(
    op: PlanOp,
    tensors: Mapping[str, PlanTensor],
    plan: Plan,
    step: Step,
    read_bytes_s: float | None,
) -> dict[str, Any]:
    moved = op_bytes(op, tensors, plan.kv_cache, step)
    return {
        "fuses": fused(op),
        "read_bytes": moved.read,
        "written_bytes": moved.written,
        "predicted_us": None if read_bytes_s is None else 1e6 * moved.read / read_bytes_s,
    }


def _split(ops: Sequence[PlanOp]) -> Iterator[tuple[int | None, list[PlanOp]]]:
    """(layer, its operators) in order. A layer starts with the first operator named after it and
    ends where the next one starts: operators named otherwise were moved into it."""
    found = [_LAYER.search(op.name) for op in ops]
    end = max((index for index, match in enumerate(found) if match), default=-1) + 1
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


def _describe(op: PlanOp, layer: int | None, tensors: Mapping[str, PlanTensor]) -> dict[str, Any]:
    """One operator as JSON values, equal for operators that differ only in their layer."""
    read = [tensors[name] for name in op.inputs.values() if name in tensors]
    weights = [tensor for tensor in read if tensor.kind == "weight"]
    return {
        "op": op.op,
        "name": _relative(op.name, layer),
        "tactic": op.tactic,
        "inputs": {
            role: _tensor(tensors[name]) if name in tensors else {"kind": "step"}
            for role, name in op.inputs.items()
        },
        "outputs": {role: _tensor(tensors[name]) for role, name in op.outputs.items()},
        "attributes": {name: value for name, value in op.attributes.items() if name != "layer"},
        "weight_bytes": sum(map(_num_bytes, weights)),  # of all it reads, shared ones included
    }


def _tensor(tensor: PlanTensor) -> dict[str, Any]:
    return {"kind": tensor.kind, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def _num_bytes(weight: PlanTensor) -> int:
    return math.prod(map(int, weight.shape)) * DTYPES[weight.dtype][1]

"""`llmctl inspect`: what an engine directory holds, from its config and header; no weight is read.

The plan is shown as the operators of one layer for all layers that are alike, so an engine of 80
layers fits a screen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.errors import EngineNotFound, Unsupported

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, Plan, PlanOp, PlanTensor

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SHORT = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "int32": "int32",
}
_KERNEL_COLUMNS = ("registers", "threads", "shared_bytes", "local_bytes", "num_bytes")
Rows = Sequence[tuple[str, ...]]


def inspect(
    path: Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
) -> None:
    """Show what an engine was built from and for, its operators, kernels and memory."""
    described = describe_engine(path)
    if as_json:
        typer.echo(json.dumps(described, ensure_ascii=False, allow_nan=False))
    else:
        typer.echo("\n".join(_text(described)))


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


# ---- for people ----


def _text(engine: Mapping[str, Any]) -> Iterator[str]:
    yield str(engine["path"])
    yield from _table(list(_summary(engine["config"])))
    yield from ("", "memory")
    yield from _table(list(_memory_rows(engine)))
    for group in engine["layers"]:
        yield from ("", _title(group["layers"]))
        yield from _table([_op_row(op) for op in group["ops"]], right=(1,))
    if engine["kernels"]:
        yield from ("", f"kernels ({len(engine['kernels'])})")
        head = ("name", "registers", "threads", "shared", "local", "bytes")
        rows = [
            (str(kernel["name"]), *(str(kernel[name]) for name in _KERNEL_COLUMNS))
            for kernel in engine["kernels"]
        ]
        yield from _table([head, *rows], right=range(1, len(head)))
    yield from ("", "files")
    rows = [(str(file["name"]), _bytes(file["bytes"])) for file in engine["files"]]
    yield from _table(rows, right=(1,))


def _summary(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, build, weights = config["pretrained_config"], config["build_config"], config["weights"]
    quantization, capability = model["quantization"], config["compute_capability"]
    yield (
        "model",
        f"{model['architecture']}, {model['num_hidden_layers']} layers, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab_size']}",
    )
    target = f", compute capability {capability}" if capability else ""
    yield "backend", f"{config['backend']}{target}, {model['dtype']}"
    yield (
        "quantization",
        f"weights {quantization['quant_algo'] or 'none'}, "
        f"KV cache {quantization['kv_cache_quant_algo'] or build['kv_cache_dtype']}",
    )
    yield (
        "limits",
        f"{build['max_batch_size']} sequences of {build['max_seq_len']} tokens, "
        f"{build['max_num_tokens']} tokens a step, {build['max_draft_len']} draft tokens, "
        f"{build['tokens_per_block']} tokens a block",
    )
    given = ", ".join(f"{k} {v}" for k, v in weights.items() if k != "load_format")
    yield "load format", f"{weights['load_format']}{': ' if given else ''}{given}"
    yield "source", str(config["source"].get("checkpoint", "unknown"))
    yield "tokenizer", str(config["tokenizer"].get("hash") or "none")
    yield "versions", ", ".join(f"{name} {text}" for name, text in config["versions"].items())
    yield "command", str(config["command"]) or "none (built by a program)"


def _memory_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory, build = engine["memory"], engine["config"]["build_config"]
    is_stored = engine["config"]["weights"]["load_format"] == "auto"
    yield "weights", _bytes(memory["weight_bytes"]) + ("" if is_stored else ", generated by run")
    yield (
        "activations",
        f"{_bytes(memory['activation_bytes'])} for {build['max_num_tokens']} tokens a step",
    )
    if engine["kernels"]:
        yield "scratch", _bytes(memory["scratch_bytes"])
        yield "kernels", _bytes(memory["kernel_bytes"])
    yield (
        "KV cache",
        f"{memory['kv_bytes_per_token']} bytes a token, "
        f"{_bytes(memory['kv_bytes_per_sequence'])} a sequence of {build['max_seq_len']}",
    )


def _title(layers: Sequence[int]) -> str:
    """ "layers 0-3, 5 (5 alike)", or what stands outside every layer."""
    if not layers:
        return "outside the layers"
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
    return f"layer {text}" if len(layers) == 1 else f"layers {text} ({len(layers)} alike)"


def _op_row(op: Mapping[str, Any]) -> tuple[str, ...]:
    inputs = " ".join(_value(role, tensor) for role, tensor in op["inputs"].items())
    outputs = " ".join(_value(role, tensor) for role, tensor in op["outputs"].items())
    weights = _bytes(op["weight_bytes"]) if op["weight_bytes"] else "-"
    return op["op"], weights, f"{inputs} -> {outputs}", op["tactic"]


def _value(role: str, tensor: Mapping[str, Any]) -> str:
    return f"{role}:{_SHORT[tensor['dtype']]}[{','.join(map(str, tensor['shape']))}]"


def _table(rows: Rows, right: Iterable[int] = ()) -> Iterator[str]:
    """Rows indented by two, columns as wide as their widest cell; `right` ones flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_right = set(right)
    for row in rows:
        cells = (
            cell.rjust(width) if index in is_right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def _bytes(count: int) -> str:
    """A size for people, in powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size} {unit}"
            )
    return f"{count} B"

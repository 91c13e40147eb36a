"""The shapes of a ReDrafter head's tensors, by their names in MODULE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmctl.builder.heads.redrafter.layouts import SCALES
from llmctl.errors import BadTensorShape, MissingTensor, Unsupported
from llmctl.plugins.schemes.scheme import Storage
from llmctl.quantize.checkpoint import TensorInfo

FLOATS = ("F32", "BF16", "F16")


def wanted_shapes(
    recurrence: str, num_layers: int, hidden_size: int, exit_dim: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """All tensors of a head with these sizes but its scales; weights are [outputs, inputs]."""
    wanted: dict[str, tuple[int, ...]] = {"lm_head.weight": (vocab_size, exit_dim)}
    for layer in range(num_layers):
        name = f"layers.{layer}.linear"
        wanted |= {f"{name}.weight": (exit_dim, exit_dim), f"{name}.bias": (exit_dim,)}
    if exit_dim != 2 * hidden_size:
        name = "input_proj"
        wanted |= {f"{name}.weight": (exit_dim, 2 * hidden_size), f"{name}.bias": (exit_dim,)}
    if recurrence != "sum":
        square = (hidden_size, hidden_size)
        wanted |= {"rnn_w.weight": square, "rnn_u.weight": square, "rnn_u.bias": (hidden_size,)}
    return wanted


def is_plain(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether no weight of these is quantized."""
    return all(info.dtype in FLOATS for n, info in tensors.items() if n.endswith(".weight"))


def plain_shapes(
    where: Path, tensors: Mapping[str, TensorInfo], storage: Storage | None
) -> dict[str, tuple[int, ...]]:
    """Those of all tensors but scales, as if nothing were quantized. Raises Unsupported."""
    found = {}
    for name, info in tensors.items():
        if name.endswith(SCALES):
            continue
        is_stored = storage is not None and info.dtype == storage.dtype and "weight" in name
        if not is_stored and info.dtype not in FLOATS:
            known = (*FLOATS, storage.dtype) if storage is not None else FLOATS
            raise Unsupported(
                f"{info.name} in {where} is {info.dtype}; heads in {', '.join(known)} are read",
                fix="use the head as it was trained, or `llmctl quantize --draft-model-dir`",
            )
        values = storage.values if storage is not None and is_stored else 1
        found[name] = (*info.shape[:1], *(size * values for size in info.shape[1:]))
    return found


def matrix_shape(where: Path, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """[outputs, inputs] of a weight. Raises MissingTensor and BadTensorShape."""
    shape = shapes.get(name)
    if shape is None:
        raise MissingTensor(f"{where} lacks {name} of its ReDrafter head", fix="fetch it again")
    if len(shape) != 2 or 0 in shape:
        raise BadTensorShape(f"{name} in {where} has shape {list(shape)}; two are wanted")
    return shape[0], shape[1]

"""A ReDrafter head as trainers write it, found and checked before a weight is read.

A folder with config.json and model.safetensors, as Apple's trainer saves it, or a checkpoint that
TensorRT-LLM's converter made of one; layouts.py has the names. Which of the two it is decides the
recurrence, for the two compute different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmctl.builder.heads.models import refuse_model
from llmctl.builder.heads.redrafter.layouts import (
    SCALES,
    converted,
    layer_numbers,
    spelled,
    stored_module,
    unexpected,
)
from llmctl.builder.heads.redrafter.names import MODULE
from llmctl.builder.heads.redrafter.shapes import (
    is_plain,
    matrix_shape,
    plain_shapes,
    wanted_shapes,
)
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
    Unsupported,
)
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo, read_header
from llmctl.quantize.format import (
    CONFIG_FILE,
    SINGLE_FILE,
    QuantizationInfo,
    has_file,
    read_json,
    read_stated_quantization,
)

CONVERTED_FILE, SECOND_RANK = "rank0.safetensors", "rank1.safetensors"
_KIND = "recurrent_drafting_drafter"
_WANTED = "give the folder of a ReDrafter head: --draft-model-dir HEAD"
_MOST = 1 << 31  # of every size


@dataclass(frozen=True, slots=True)
class RecurrentHead:
    """The head of a checkpoint: every shape fits, no weight has been read."""

    where: Path
    recurrence: str  # one of RECURRENCES
    num_layers: int
    hidden_size: int
    exit_dim: int
    vocab_size: int
    num_beams: int | None  # that the checkpoint was converted for
    draft_len_per_beam: int | None
    tensors: Mapping[str, TensorInfo]  # by their names in MODULE
    is_converted: bool
    quantization: QuantizationInfo | None

    @property
    def file_name(self) -> str:
        """Of the weights, in its layout."""
        return CONVERTED_FILE if self.is_converted else SINGLE_FILE

    def stored_module(self, module: str) -> str:
        """What its layout calls a linear of MODULE."""
        return stored_module(module, self.num_layers, is_converted=self.is_converted)

    def stored(self) -> dict[str, TensorInfo]:
        """The tensors by their names in its layout."""
        parts = {name: name.rpartition(".") for name in self.tensors}
        return {
            f"{self.stored_module(module)}.{kind}": self.tensors[name]
            for name, (module, _, kind) in parts.items()
        }

    def beside(self, target: Checkpoint) -> Checkpoint:
        """The target's checkpoint with the head in it, in MODULE, quantized as its own config.json
        says."""
        tensors = dict(target.tensors)
        for name, own in self.tensors.items():
            full = f"{MODULE}.{name}"
            tensors[full] = replace(own, name=full)
        found = replace(target, tensors=tensors)
        if self.quantization is not None:
            return replace(found, apart={**target.apart, MODULE: self.quantization})
        info = target.quantization
        if info is not None:
            info = replace(info, exclude=(*info.exclude, MODULE))
        return replace(found, quantization=info)


def is_redrafter(folder: Path) -> bool:
    """Whether a folder says, by its config.json, that it holds such a head."""
    path = folder / CONFIG_FILE
    config = read_json(path) if has_file(path) else {}
    return config.get("model_type") == _KIND or _is_converted(config)


def _is_converted(config: Mapping[str, Any]) -> bool:
    return any(name.startswith("redrafter_") for name in config)


def open_head(folder: Path) -> RecurrentHead:
    """The head of a folder.

    Raises CheckpointNotFound, CorruptFile, MissingTensor, UnexpectedTensor, BadTensorShape,
    BadConfig (config.json contradicts the tensors, a whole model), UnknownQuantization and
    Unsupported.
    """
    path = folder / CONFIG_FILE
    refuse_model(folder)
    if not has_file(path):
        raise CheckpointNotFound(f"{path} does not exist", fix=_WANTED)
    config = read_json(path)
    is_converted = _is_converted(config)
    quantization = read_stated_quantization(folder, config)
    file = folder / (CONVERTED_FILE if is_converted else SINGLE_FILE)
    if not has_file(file):
        raise CheckpointNotFound(f"{folder} has no {file.name}", fix=_WANTED)
    if is_converted and has_file(folder / SECOND_RANK):
        raise Unsupported(
            f"{folder} holds a head that was split over several ranks",
            fix="convert it with --tp_size 1, or use the head as it was trained",
        )
    kind = config.get("model_type", _KIND)
    if not is_converted and kind != _KIND:
        raise Unsupported(
            f"{path} says model_type {kind!r}; a ReDrafter head says {_KIND!r}",
            fix=_WANTED,
        )
    stored = read_header(file)
    tensors = converted(file, stored) if is_converted else spelled(file, stored)
    return _check(file, path, config, is_converted, tensors, quantization)


def require_fit(head: RecurrentHead, hidden_size: int, vocab_size: int) -> None:
    """Raise PairMismatch for a head that was trained for another target."""
    pairs = (
        ("hidden_size", head.hidden_size, hidden_size),
        ("vocab_size", head.vocab_size, vocab_size),
    )
    for name, own, wanted in pairs:
        if own != wanted:
            raise PairMismatch(
                f"the ReDrafter head in {head.where} has {name} {own}, the target has {wanted}",
                fix="use a head that was trained for this target",
            )


def _check(
    where: Path,
    config_path: Path,
    config: Mapping[str, Any],
    is_converted: bool,
    tensors: Mapping[str, TensorInfo],
    quantization: QuantizationInfo | None,
) -> RecurrentHead:
    """What config, names, dtypes and shapes amount to. The scales of a quantized head are checked
    with those of the target."""
    prefix = "redrafter_" if is_converted else ""

    def size(name: str) -> int | None:
        value: int | None = config.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
            raise CorruptFile(f"{config_path}: {name} is {value!r}; a positive integer is wanted")
        return value

    recurrence = _recurrence(config_path, config, is_converted, tensors)
    storage = (
        None
        if quantization is None or quantization.scheme is None
        else (quantization.scheme.storage)
    )
    shapes = plain_shapes(where, tensors, storage)
    vocab_size, exit_dim = matrix_shape(where, shapes, "lm_head.weight")
    if recurrence != "sum":
        hidden_size = matrix_shape(where, shapes, "rnn_w.weight")[0]
    elif "input_proj.weight" in tensors:
        hidden_size = matrix_shape(where, shapes, "input_proj.weight")[1] // 2
    else:
        hidden_size = exit_dim // 2
    head = RecurrentHead(
        *(where, recurrence, len(layer_numbers(tensors)), hidden_size, exit_dim, vocab_size),
        size("redrafter_num_beams") if is_converted else None,
        size("redrafter_draft_len_per_beam") if is_converted else None,
        tensors,
        is_converted,
        None if is_plain(tensors) else quantization,
    )
    _check_shapes(head, shapes)
    said = {"vocab_size": vocab_size, f"{prefix}hidden_size": hidden_size}
    said[f"{prefix}exit_dim"] = exit_dim
    for name, found in said.items():
        if size(name) not in (None, found):
            raise BadConfig(
                f"{config_path} says {name} {config[name]}, the tensors in {where.name} have "
                f"{found}",
                fix="check that config.json belongs to these weights",
            )
    return head


def _recurrence(
    path: Path, config: Mapping[str, Any], is_converted: bool, tensors: Mapping[str, TensorInfo]
) -> str:
    """What the checkpoint computes. Where config.json says nothing, its tensors do."""
    name = "redrafter_is_rnn" if is_converted else "rnn"
    found = sorted(key for key in tensors if key.startswith("rnn_"))
    is_rnn = config.get(name, bool(found))
    if type(is_rnn) is not bool:
        raise CorruptFile(f"{path}: {name} is {is_rnn!r}; true or false is wanted")
    if not is_rnn and found:
        raise UnexpectedTensor(
            f"{path} says {name} false, and the head holds {found[0]}",
            fix="check that config.json belongs to these weights",
        )
    if not is_rnn:
        return "sum"
    return "linear" if is_converted else "silu"


def _check_shapes(head: RecurrentHead, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """All tensors that such a head has, each of its shape, and no others."""
    sizes = (head.hidden_size, head.exit_dim, head.vocab_size)
    wanted = wanted_shapes(head.recurrence, head.num_layers, *sizes)
    absent = [name for name in wanted if name not in shapes]
    if absent:
        raise MissingTensor(
            f"{head.where} lacks {len(absent)} of the {len(wanted)} tensors of a ReDrafter head "
            f"with {head.num_layers} layers: {', '.join(absent[:8])}",
            fix="fetch the head again",
        )
    for name, info in head.tensors.items():
        module, _, kind = name.rpartition(".")
        is_scale = head.quantization is not None and kind in SCALES
        if f"{module}.weight" not in wanted if is_scale else name not in wanted:
            raise unexpected(head.where, info.name)
        if not is_scale and shapes[name] != wanted[name]:
            raise BadTensorShape(
                f"{info.name} in {head.where} has shape {list(info.shape)}; the others imply "
                f"{list(wanted[name])}",
                fix="fetch the head again",
            )

"""A ReDrafter head as trainers write it, found and checked before a weight is read.

A folder with config.json and model.safetensors, as Apple's trainer saves it:

    input_proj.{weight,bias}           [exit, 2 hidden], [exit]; only where exit is not 2 hidden
    lm_head.{i}.linear.{weight,bias}   [exit, exit], [exit], for i = 0, 1, ...
    lm_head.{n}.weight                 [vocab, exit], n: how many i there are
    rnn_w.weight, rnn_u.{weight,bias}  [hidden, hidden], [hidden]; not where "rnn" is false

or a checkpoint that TensorRT-LLM's converter made of one, whose names are those that an engine has
them under: drafter.layers.{i}.linear, drafter.lm_head, drafter.rnn_w, ... Which of the two it is
decides the recurrence, for the two compute different ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from llmctl.quantize.format import CONFIG_FILE, SINGLE_FILE, read_json

MODULE = "drafter"  # that the head is in, in an engine as in TensorRT-LLM's checkpoints
CONVERTED_FILE, SECOND_RANK = "rank0.safetensors", "rank1.safetensors"
_KIND = "recurrent_drafting_drafter"
_MOST = 1 << 31  # of every size
_FLOATS = ("F32", "BF16", "F16")
_UNREAD = ("emb_norm.weight",)  # that no implementation applies
_SPELLINGS = (  # names of several revisions of Apple's code -> those in MODULE
    (re.compile(r"input_projs?\.(weight|bias)"), r"input_proj.\1"),
    (re.compile(r"(?:lm_heads?|0)\.(\d{1,3})\.linear\.(weight|bias)"), r"layers.\1.linear.\2"),
    (re.compile(r"(?:lm_heads?|0)\.(\d{1,3})\.weight"), r"lm_head.\1"),
    (re.compile(r"(rnn_u\.(?:weight|bias)|rnn_w\.weight)"), r"\1"),
)
_CONVERTED = re.compile(
    r"(input_proj|layers\.\d{1,3}\.linear|rnn_u)\.(weight|bias)|(lm_head|rnn_w)\.weight"
)


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

    def beside(self, target: Checkpoint) -> Checkpoint:
        """The target's checkpoint with the head in it, unquantized, in MODULE."""
        tensors = dict(target.tensors)
        for name, found in self.tensors.items():
            full = f"{MODULE}.{name}"
            tensors[full] = replace(found, name=full)
        info = target.quantization
        if info is not None:
            info = replace(info, exclude=(*info.exclude, MODULE))
        return replace(target, tensors=tensors, quantization=info)


def open_head(folder: Path) -> RecurrentHead:
    """The head of a folder.

    Raises CheckpointNotFound, CorruptFile, MissingTensor, UnexpectedTensor, BadTensorShape,
    BadConfig (a config.json that says otherwise than the tensors) and Unsupported.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointNotFound(
            f"{path} does not exist",
            fix="give the folder of a ReDrafter head: --draft-model-dir HEAD",
        )
    config = read_json(path)
    is_converted = any(name.startswith("redrafter_") for name in config)
    file = folder / (CONVERTED_FILE if is_converted else SINGLE_FILE)
    if not file.is_file():
        raise CheckpointNotFound(f"{folder} has no {file.name}", fix="fetch the head again")
    if is_converted and (folder / SECOND_RANK).is_file():
        raise Unsupported(
            f"{folder} holds a head that was split over several ranks",
            fix="convert it with --tp_size 1, or use the head as it was trained",
        )
    kind = config.get("model_type", _KIND)
    if not is_converted and kind != _KIND:
        raise Unsupported(
            f"{path} says model_type {kind!r}; a ReDrafter head says {_KIND!r}",
            fix="give the folder of a ReDrafter head: --draft-model-dir HEAD",
        )
    stored = read_header(file)
    tensors = _converted(file, stored) if is_converted else _spelled(file, stored)
    return _check(file, path, config, is_converted, tensors)


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


def _spelled(where: Path, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors as Apple's code names them, by their names in MODULE. The output matrix, whose name
    is a number there, has the highest."""
    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        if name in _UNREAD:
            continue
        own = next((p.sub(to, name) for p, to in _SPELLINGS if p.fullmatch(name)), None)
        if own is None:
            raise _unexpected(where, name)
        if own in found:
            raise _unexpected(where, f"{name} beside {found[own].name}")
        found[own] = info
    layers = len(_layers(found))
    output = f"lm_head.{layers}"
    others = [name for name in found if name.startswith("lm_head.") and name != output]
    if others:
        raise UnexpectedTensor(
            f"{where} holds {found[others[0]].name}; with {layers} layers the output matrix is "
            f"lm_head.{layers}.weight",
            fix="fetch the head again",
        )
    if output in found:
        found["lm_head.weight"] = found.pop(output)
    return found


def _layers(names: Iterable[str]) -> set[str]:
    """The numbers of the layers that names are of."""
    return {name.split(".")[1] for name in names if name.startswith("layers.")}


def _converted(where: Path, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of TensorRT-LLM's checkpoint, which holds the target too."""
    prefix = f"{MODULE}."
    own = {n.removeprefix(prefix): info for n, info in stored.items() if n.startswith(prefix)}
    for name in own:
        if not _CONVERTED.fullmatch(name):
            raise _unexpected(where, prefix + name)
    return own


def _unexpected(where: Path, name: str) -> UnexpectedTensor:
    return UnexpectedTensor(
        f"{where} holds {name}, which no ReDrafter head has",
        fix="use a head in the layout of apple/ml-recurrent-drafter",
    )


def _check(
    where: Path,
    config_path: Path,
    config: Mapping[str, Any],
    is_converted: bool,
    tensors: Mapping[str, TensorInfo],
) -> RecurrentHead:
    """What config, names, dtypes and shapes amount to."""
    prefix = "redrafter_" if is_converted else ""

    def size(name: str) -> int | None:
        value: int | None = config.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
            raise CorruptFile(f"{config_path}: {name} is {value!r}; a positive integer is wanted")
        return value

    recurrence = _recurrence(config_path, config, is_converted, tensors)
    vocab_size, exit_dim = _matrix(where, tensors, "lm_head.weight")
    if recurrence != "sum":
        hidden_size = _matrix(where, tensors, "rnn_w.weight")[0]
    elif "input_proj.weight" in tensors:
        hidden_size = _matrix(where, tensors, "input_proj.weight")[1] // 2
    else:
        hidden_size = exit_dim // 2
    head = RecurrentHead(
        *(where, recurrence, len(_layers(tensors)), hidden_size, exit_dim, vocab_size),
        size("redrafter_num_beams") if is_converted else None,
        size("redrafter_draft_len_per_beam") if is_converted else None,
        tensors,
    )
    _check_shapes(head)
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


def _matrix(where: Path, tensors: Mapping[str, TensorInfo], name: str) -> tuple[int, int]:
    info = tensors.get(name)
    if info is None:
        raise MissingTensor(f"{where} lacks {name} of its ReDrafter head", fix="fetch it again")
    if len(info.shape) != 2 or 0 in info.shape:
        raise BadTensorShape(f"{info.name} in {where} has shape {list(info.shape)}; two are wanted")
    return info.shape[0], info.shape[1]


def _check_shapes(head: RecurrentHead) -> None:
    """All tensors that such a head has, each of its shape and dtype, and no others."""
    hidden, exit_dim = head.hidden_size, head.exit_dim
    wanted: dict[str, tuple[int, ...]] = {"lm_head.weight": (head.vocab_size, exit_dim)}
    for layer in range(head.num_layers):
        name = f"layers.{layer}.linear"
        wanted |= {f"{name}.weight": (exit_dim, exit_dim), f"{name}.bias": (exit_dim,)}
    if exit_dim != 2 * hidden:
        name = "input_proj"
        wanted |= {f"{name}.weight": (exit_dim, 2 * hidden), f"{name}.bias": (exit_dim,)}
    if head.recurrence != "sum":
        wanted |= {"rnn_w.weight": (hidden, hidden), "rnn_u.weight": (hidden, hidden)}
        wanted["rnn_u.bias"] = (hidden,)
    absent = [name for name in wanted if name not in head.tensors]
    if absent:
        raise MissingTensor(
            f"{head.where} lacks {len(absent)} of the {len(wanted)} tensors of a ReDrafter head "
            f"with {head.num_layers} layers: {', '.join(absent[:8])}",
            fix="fetch the head again",
        )
    for name, info in head.tensors.items():
        if name not in wanted:
            raise _unexpected(head.where, info.name)
        if info.shape != wanted[name]:
            raise BadTensorShape(
                f"{info.name} in {head.where} has shape {list(info.shape)}; the others imply "
                f"{list(wanted[name])}",
                fix="fetch the head again",
            )
        if info.dtype not in _FLOATS:
            raise Unsupported(
                f"{info.name} in {head.where} is {info.dtype}; heads in {', '.join(_FLOATS)} are "
                "read",
                fix="use the head as it was trained",
            )

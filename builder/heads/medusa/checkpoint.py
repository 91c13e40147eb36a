"""Medusa heads as they are published, found and checked before a weight is read.

Head m has residual blocks l = 0, 1, ... and an output matrix behind them:

    {m}.{l}.linear.weight [hidden, hidden]
    {m}.{l}.linear.bias [hidden]
    {m}.{L}.weight [vocab, hidden]

in medusa_lm_head.safetensors or .pt of a folder of its own, or in the module "medusa_head" of the
target (Medusa-2). How many heads and blocks there are is what the names say: published config files
state wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.heads.medusa.pickled import describe_pickled, read_pickled
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    CheckpointNotFound,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
    Unsupported,
)
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo, read_header

if TYPE_CHECKING:
    import torch

MODULE = "medusa_head"  # that heads are in, in an engine as in a Medusa-2 checkpoint
SAFE_FILE = "medusa_lm_head.safetensors"
PICKLED_FILE = "medusa_lm_head.pt"
_NAME = re.compile(r"(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """The heads of a checkpoint: every shape fits, no weight has been read."""

    where: Path  # the file, or the folder of the target's own checkpoint
    num_heads: int
    num_layers: int  # residual blocks of each
    hidden_size: int
    vocab_size: int
    tensors: Mapping[str, TensorInfo]  # by their published names
    held: Mapping[str, torch.Tensor]  # of a pickled file

    def beside(self, target: Checkpoint, num_heads: int) -> Checkpoint:
        """The target's checkpoint with the first heads in it, unquantized, in MODULE."""
        tensors = dict(target.tensors)
        held = dict(target.held)
        for name in _names(num_heads, self.num_layers):
            full = f"{MODULE}.{name}"
            tensors[full] = replace(self.tensors[name], name=full)
            if name in self.held:
                held[full] = self.held[name]
        info = target.quantization
        if info is not None:
            info = replace(info, exclude=(*info.exclude, MODULE))
        return replace(target, tensors=tensors, held=held, quantization=info)


def open_heads(folder: Path | None, target: Checkpoint) -> MedusaHeads:
    """The heads of a folder; without one, those of the target's own checkpoint.

    Raises CheckpointNotFound, CorruptFile, PickleCheckpoint, MissingTensor, UnexpectedTensor,
    BadTensorShape, Unsupported (a layout that is not read).
    """
    if folder is None:
        prefix = f"{MODULE}."
        own = {
            name.removeprefix(prefix): info
            for name, info in target.tensors.items()
            if name.startswith(prefix)
        }
        if not own:
            raise BadConfig(
                f"--speculative-decoding-mode medusa: {target.path} holds no {MODULE} tensors",
                fix="name the folder of the heads: --draft-model-dir HEADS",
            )
        return _check(target.path, own, {})
    safe, pickled = folder / SAFE_FILE, folder / PICKLED_FILE
    if safe.is_file():
        return _check(safe, read_header(safe), {})
    if pickled.is_file():
        held = read_pickled(pickled)
        return _check(pickled, describe_pickled(pickled, held), held)
    raise CheckpointNotFound(
        f"{folder} has neither {SAFE_FILE} nor {PICKLED_FILE}",
        fix="give the folder of published Medusa heads: --draft-model-dir HEADS",
    )


def require_fit(heads: MedusaHeads, hidden_size: int, vocab_size: int) -> None:
    """Raise PairMismatch for heads that were trained for another target."""
    pairs = (
        ("hidden_size", heads.hidden_size, hidden_size),
        ("vocab_size", heads.vocab_size, vocab_size),
    )
    for name, own, wanted in pairs:
        if own != wanted:
            raise PairMismatch(
                f"the Medusa heads in {heads.where} have {name} {own}, the target has {wanted}",
                fix="use heads that were trained for this target",
            )


def _check(
    where: Path, tensors: Mapping[str, TensorInfo], held: Mapping[str, torch.Tensor]
) -> MedusaHeads:
    """What the names, dtypes and shapes amount to."""
    num_heads, num_layers = _count(where, tensors)
    expected = _names(num_heads, num_layers)
    absent = [name for name in expected if name not in tensors]
    if absent:
        raise MissingTensor(
            f"{where} lacks {len(absent)} of the {len(expected)} tensors of {num_heads} heads with "
            f"{num_layers} residual blocks each: {', '.join(absent[:8])}",
            fix="fetch the heads again",
        )
    vocab_size, hidden_size = _matrix(where, tensors[f"0.{num_layers}.weight"])
    sizes = {"linear.weight": (hidden_size, hidden_size), "linear.bias": (hidden_size,)}
    for name in expected:
        info = tensors[name]
        wanted = sizes.get(name.split(".", 2)[2], (vocab_size, hidden_size))
        if info.shape != wanted:
            raise BadTensorShape(
                f"{name} in {where} has shape {list(info.shape)}; the other heads imply "
                f"{list(wanted)}",
                fix="fetch the heads again",
            )
        if info.dtype not in _FLOATS:
            raise Unsupported(
                f"{name} in {where} is {info.dtype}; heads in {', '.join(_FLOATS)} are read",
                fix="use the heads as they were trained",
            )
    return MedusaHeads(where, num_heads, num_layers, hidden_size, vocab_size, tensors, held)


def _count(where: Path, names: Iterable[str]) -> tuple[int, int]:
    """(heads, residual blocks of each) that the names say."""
    num_heads = num_layers = 0
    has_output = False
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnexpectedTensor(
                f"{where} holds {name!r}, which no Medusa head has; heads are read as "
                "HEAD.BLOCK.linear.weight, HEAD.BLOCK.linear.bias and HEAD.BLOCK.weight",
                fix="use heads in the layout of FasterDecoding/Medusa",
            )
        num_heads = max(num_heads, int(found[1]) + 1)
        if found[3] != "weight":
            num_layers = max(num_layers, int(found[2]) + 1)
        has_output = has_output or found[3] == "weight"
    if not has_output:
        raise Unsupported(
            f"{where} holds no output matrix: its heads share the target's, a layout that is not "
            "read",
            fix="use heads that have output matrices of their own",
        )
    return num_heads, num_layers


def _names(num_heads: int, num_layers: int) -> list[str]:
    return [
        name
        for head in range(num_heads)
        for name in (
            *(
                f"{head}.{layer}.linear.{kind}"
                for layer in range(num_layers)
                for kind in ("weight", "bias")
            ),
            f"{head}.{num_layers}.weight",
        )
    ]


def _matrix(where: Path, info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) != 2 or 0 in info.shape:
        raise BadTensorShape(
            f"{info.name} in {where} has shape {list(info.shape)}; [vocabulary, hidden size] is "
            "wanted",
            fix="fetch the heads again",
        )
    return info.shape[0], info.shape[1]

"""Medusa heads as they are published (layouts.py), found and checked before a weight is read.

They are in a folder of their own or in the module "medusa_head" of the target (Medusa-2). How many
heads and blocks there are is what the names say: published config files state wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.medusa.layouts import MODULE, SHARED, Layout, find_layout, renamed
from llmctl.builder.heads.medusa.pickled import describe_pickled, read_pickled
from llmctl.builder.heads.models import refuse_model
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    CheckpointNotFound,
    MissingTensor,
    PairMismatch,
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

if TYPE_CHECKING:
    import torch

SAFE_FILE = "medusa_lm_head.safetensors"
PICKLED_FILE = "medusa_lm_head.pt"
_FLOATS = ("F32", "BF16", "F16")
_SCALES = ("weight_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """The heads of a checkpoint: every shape fits, no weight has been read."""

    where: Path  # the file, or the folder of the target's own checkpoint
    layout: Layout
    hidden_size: int
    vocab_size: int | None  # None: the output projection is the target's
    tensors: Mapping[str, TensorInfo]  # by their names in layouts.py
    held: Mapping[str, torch.Tensor]  # of a pickled file
    quantization: QuantizationInfo | None  # of the checkpoint that they are from

    @property
    def num_heads(self) -> int:
        """As many as there are."""
        return self.layout.num_heads

    @property
    def num_layers(self) -> int:
        """Residual blocks of each."""
        return self.layout.num_layers

    def beside(self, target: Checkpoint, num_heads: int) -> Checkpoint:
        """The target's checkpoint with the first heads in it, in MODULE, quantized as where they
        are from says."""
        tensors, held = dict(target.tensors), dict(target.held)
        linears = self.layout.linears(num_heads)
        scales = [f"{module}.{kind}" for module in linears for kind in _SCALES]
        for name in (*self.layout.names(num_heads), *(s for s in scales if s in self.tensors)):
            full = f"{MODULE}.{name}"
            tensors[full] = replace(self.tensors[name], name=full)
            if name in self.held:
                held[full] = self.held[name]
        found = replace(target, tensors=tensors, held=held)
        if any(self.tensors[f"{module}.weight"].dtype not in _FLOATS for module in linears):
            assert self.quantization is not None
            return replace(found, apart={**target.apart, MODULE: self.quantization})
        info = target.quantization
        if info is not None:
            info = replace(info, exclude=(*info.exclude, MODULE))
        return replace(found, quantization=info)


def open_heads(folder: Path | None, target: Checkpoint) -> MedusaHeads:
    """The heads of a folder; without one, those of the target's own checkpoint.

    Raises CheckpointNotFound, CorruptFile, PickleCheckpoint, MissingTensor, UnexpectedTensor,
    BadTensorShape, UnknownQuantization, Unsupported (a layout that is not read) and BadConfig (a
    whole model).
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
        return _check(target.path, own, {}, target.quantization)
    refuse_model(folder)
    path = folder / CONFIG_FILE
    config = read_json(path) if has_file(path) else {}
    info = read_stated_quantization(folder, config)
    held: Mapping[str, torch.Tensor] = {}
    safe, pickled, whole = (folder / name for name in (SAFE_FILE, PICKLED_FILE, SINGLE_FILE))
    if has_file(safe):
        where, tensors = safe, read_header(safe)
    elif has_file(pickled):
        where, held = pickled, read_pickled(pickled)
        tensors = describe_pickled(pickled, held)
    elif has_file(whole):
        where, tensors = whole, read_header(whole)
    else:
        raise CheckpointNotFound(
            f"{folder} has neither {SAFE_FILE} nor {PICKLED_FILE} nor {SINGLE_FILE}",
            fix="give the folder of published Medusa heads: --draft-model-dir HEADS",
        )
    named = renamed(tensors, config, where), renamed(held, config, where)
    return _check(where, *named, info)


def require_fit(heads: MedusaHeads, hidden_size: int, vocab_size: int) -> None:
    """Raise PairMismatch for heads that were trained for another target."""
    pairs = (
        ("hidden_size", heads.hidden_size, hidden_size),
        ("vocab_size", heads.vocab_size, vocab_size),
    )
    for name, own, wanted in pairs:
        if own not in (wanted, None):
            raise PairMismatch(
                f"the Medusa heads in {heads.where} have {name} {own}, the target has {wanted}",
                fix="use heads that were trained for this target",
            )


def _check(
    where: Path,
    tensors: Mapping[str, TensorInfo],
    held: Mapping[str, torch.Tensor],
    quantization: QuantizationInfo | None,
) -> MedusaHeads:
    """What the names, dtypes and shapes amount to. The scales of quantized heads are checked with
    those of the target."""
    layout = find_layout(tensors, where)
    expected = layout.names(layout.num_heads)
    absent = [name for name in expected if name not in tensors]
    if absent:
        raise MissingTensor(
            f"{where} lacks {len(absent)} of the {len(expected)} tensors of {layout.num_heads} "
            f"heads with {layout.num_layers} residual blocks each: {', '.join(absent[:8])}",
            fix="fetch the heads again",
        )
    scheme = None if quantization is None else quantization.scheme

    def shape(name: str) -> tuple[int, ...]:
        """As if it were not quantized."""
        info = tensors[name]
        known = _FLOATS if scheme is None else (*_FLOATS, scheme.storage.dtype)
        if info.dtype not in known:
            raise Unsupported(
                f"{name} in {where} is {info.dtype}; heads in {', '.join(known)} are read",
                fix="use the heads as they were trained, or `llmctl quantize --draft-model-dir`",
            )
        is_stored = scheme is not None and info.dtype == scheme.storage.dtype
        values = scheme.storage.values if scheme is not None and is_stored else 1
        return (*info.shape[:1], *(size * values for size in info.shape[1:]))

    output = expected[-1] if expected[-1].startswith(SHARED) else f"0.{layout.num_layers}.weight"
    vocab_size: int | None = None
    if output in tensors:
        vocab_size, hidden_size = _matrix(where, output, shape(output))
    else:
        _, hidden_size = _matrix(where, expected[0], shape(expected[0]))
    sizes = {"linear.weight": (hidden_size, hidden_size), "linear.bias": (hidden_size,)}
    for name in expected:
        wanted: Any = sizes.get(name.partition(".")[2].partition(".")[2], (vocab_size, hidden_size))
        if shape(name) != wanted:
            raise BadTensorShape(
                f"{name} in {where} has shape {list(tensors[name].shape)}; the other heads imply "
                f"{list(wanted)}",
                fix="fetch the heads again",
            )
    return MedusaHeads(where, layout, hidden_size, vocab_size, tensors, held, quantization)


def _matrix(where: Path, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or 0 in shape:
        raise BadTensorShape(
            f"{name} in {where} has shape {list(shape)}; [vocabulary, hidden size] is wanted",
            fix="fetch the heads again",
        )
    return shape[0], shape[1]

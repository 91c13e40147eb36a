"""Tensors of a file that `torch.save` wrote, where heads are published as nothing else.

torch reads it with `weights_only`: its unpickler knows tensors and containers and calls nothing
that the file names. What it gives must then be a plain dictionary of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.heads.medusa.pickle_form import check_form
from llmctl.errors import PickleCheckpoint
from llmctl.quantize.checkpoint import DTYPES, MAX_DIMENSIONS, TensorInfo
from llmctl.quantize.format import clipped, shown

if TYPE_CHECKING:
    import torch


def read_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a .pt file by name, mapped rather than read.

    Raises PickleCheckpoint for a file that holds anything else, whatever its format.
    """
    import torch

    try:
        check_form(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a file that nobody vouches for makes of the reader
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        words = f"torch does not read it as tensors alone: {clipped(first, 160)}"
        raise _refused(path, words) from error
    if not isinstance(found, dict) or not found:
        raise _refused(path, f"it holds a {type(found).__name__}; tensors by name are wanted")
    by_name = dict.items(found)  # an OrderedDict may have another `items` of its own
    for name, tensor in by_name:
        if not isinstance(name, str):
            raise _refused(path, f"it has a {type(name).__name__} in the place of a name")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _refused(path, f"its {shown(name)} is a {type(tensor).__name__}, no tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise _refused(path, f"its {shown(name)} is no dense tensor of the CPU")
        if tensor.dim() > MAX_DIMENSIONS or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise _refused(path, f"its {shown(name)} has more dimensions or values than it stores")
    return {name: tensor.detach() for name, tensor in by_name}


def describe_pickled(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """What a header would say of tensors read from `path`. Raises PickleCheckpoint."""
    names = {name: stored for stored, (name, _) in DTYPES.items()}
    found = {}
    for name, tensor in tensors.items():
        dtype = names.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise _refused(path, f"its {shown(name)} is {tensor.dtype}, which no checkpoint has")
        found[name] = TensorInfo(name, dtype, tuple(tensor.shape), path, 0, tensor.nbytes)
    return found


def _refused(path: Path, what: str) -> PickleCheckpoint:
    safe = path.with_suffix(".safetensors").name
    convert = (
        "import torch, safetensors.torch as s; "
        f"t = torch.load('{path.name}', map_location='cpu', weights_only=False); "
        f"s.save_file({{k: v.contiguous() for k, v in t.items()}}, '{safe}')"
    )
    return PickleCheckpoint(
        f"{path} is refused: {what}", fix=f'where you trust the file: python -c "{convert}"'
    )

"""Tensors of a file that `torch.save` wrote, where heads are published as nothing else.

torch reads it with `weights_only`: its unpickler knows tensors and containers and calls nothing
that the file names. What it gives must then be a plain dictionary of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.errors import PickleCheckpoint
from llmctl.quantize.checkpoint import DTYPES, TensorInfo

if TYPE_CHECKING:
    import torch


def read_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a .pt file by name, mapped rather than read.

    Raises PickleCheckpoint for a file that holds anything else, whatever its format.
    """
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a file that nobody vouches for makes of the reader
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise _refused(path, f"torch does not read it as tensors alone: {first[:160]}") from error
    if not isinstance(found, dict) or not found:
        raise _refused(path, f"it holds a {type(found).__name__}; tensors by name are wanted")
    for name, tensor in found.items():
        if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _refused(path, f"its {name!r} is a {type(tensor).__name__}, no tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise _refused(path, f"its {name!r} is no dense tensor of the CPU")
    return {name: tensor.detach() for name, tensor in found.items()}


def describe_pickled(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """What a header would say of tensors read from `path`. Raises PickleCheckpoint."""
    names = {name: stored for stored, (name, _) in DTYPES.items()}
    found = {}
    for name, tensor in tensors.items():
        dtype = names.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise _refused(path, f"its {name!r} is {tensor.dtype}, which no checkpoint has")
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

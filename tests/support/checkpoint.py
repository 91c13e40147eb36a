"""Changes to checkpoints, for tests of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Let `change` loose on the tensors of a checkpoint of one file; the folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder

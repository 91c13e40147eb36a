"""Checkpoints made by hand, and builds that must fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.errors import (
    LlmctlError,
)

FP8 = torch.float8_e4m3fn


QUANTIZATION = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


LINEARS = [f"self_attn.{n}_proj" for n in "qkvo"] + [
    f"mlp.{n}_proj" for n in ("gate", "up", "down")
]


Tensors = dict[str, torch.Tensor]


def configure(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def build(folder: Path, **fields: Any) -> Path:
    output = folder.parent / "engine"
    run_build(plan_build(folder, BuildRequest(**fields)), output)
    return output


def refuse(folder: Path, error: type[LlmctlError], text: str, **fields: Any) -> LlmctlError:
    """Building raises `error` and leaves nothing beside the checkpoint."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=text) as caught:
        build(folder, **fields)
    assert sorted(folder.parent.iterdir()) == before
    return caught.value

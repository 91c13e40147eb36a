"""Short names of element types, as kernel arguments and kernel names use them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
}


@cache
def short_name(dtype: torch.dtype | str) -> str:
    """ "bf16" for torch.bfloat16 or "bfloat16"."""
    return _SHORT[str(dtype).removeprefix("torch.")]


@cache
def pointer(dtype: torch.dtype | str) -> str:
    """The type of a kernel argument that points to such elements: "*bf16"."""
    return f"*{short_name(dtype)}"

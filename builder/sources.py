"""Where the bytes of an engine's weights come from, and the checks they pass.

A source knows its dtype and shape from headers alone and yields its values in row chunks, so
writing an engine never holds more than one chunk of one tensor, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmctl.builder.rope import Rope
from llmctl.errors import BadTensorShape, BadTensorValue

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 32 << 20  # large enough for sequential I/O, small compared with any model


class TensorReader(Protocol):
    """What a source needs of a checkpoint."""

    def read(self, name: str) -> torch.Tensor: ...


class Source(Protocol):
    """How one weight of the engine is made. `names` are the checkpoint tensors it reads."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        """The values in order, contiguous, of `dtype`; concatenated on axis 0 they are `shape`."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors of the checkpoint stacked along axis 0 and converted to one dtype.

    Raises BadTensorValue for NaN or infinity, before or after the conversion.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (checkpoint name, shape)
    dtype: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        for name, shape in self.parts:
            stored = checkpoint.read(name)
            row_bytes = max(1, math.prod(shape[1:]) * max(stored.itemsize, dtype.itemsize))
            step = max(1, CHUNK_BYTES // row_bytes)
            for start in range(0, shape[0], step):
                chunk = stored[start : start + step]
                require_finite(name, chunk, "holds NaN or infinity")
                if chunk.dtype != dtype:
                    chunk = chunk.to(dtype)
                    require_finite(name, chunk, f"has values that do not fit {self.dtype}")
                yield chunk.contiguous()


@dataclass(frozen=True, slots=True)
class RowScales:
    """One float32 dequantization multiplier per output row of a (merged) linear.

    A part's scale has one element (per tensor) or one a row (per channel), in any float dtype.
    """

    parts: tuple[tuple[str, int], ...]  # (checkpoint name, rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows for _, rows in self.parts),)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        for name, rows in self.parts:
            yield read_scale(checkpoint, name, rows).expand(rows).contiguous()


@dataclass(frozen=True, slots=True)
class LargestScale:
    """The largest of several one-element scales, float32 [1].

    Linears that share an input normally share its scale; where an exporter gave them different
    ones, the merged linear takes the largest, which covers every part's range.
    """

    names: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        yield torch.cat([read_scale(checkpoint, name, 1) for name in self.names]).amax(0, True)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """float32 [positions, head_size]: a row holds D/2 cosines, then D/2 sines. Engine files hold
    its definition alone."""

    rope: Rope
    positions: int
    head_size: int

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.positions, self.head_size)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        """What loading an engine computes, whole."""
        yield self.rope.table(0, self.positions, self.head_size)


def read_scale(checkpoint: TensorReader, name: str, rows: int) -> torch.Tensor:
    """A scale as float32 [1] or [rows], whatever its stored shape and float dtype.

    Raises BadTensorShape when it has neither 1 nor `rows` elements, or those in a grid of blocks,
    BadTensorValue when an element is not a positive finite number.
    """
    import torch

    stored = checkpoint.read(name)
    is_grid = max(stored.shape, default=1) < stored.numel()
    if stored.numel() not in (1, rows) or is_grid or not stored.dtype.is_floating_point:
        raise BadTensorShape(
            f"{name} is {stored.dtype} {list(stored.shape)}; "
            f"a float scale of 1 or {rows} elements is wanted",
            fix="export the checkpoint again with per-tensor or per-channel FP8 scales",
        )
    scale = stored.reshape(-1).to(torch.float32)
    if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()):
        worst = scale[~(torch.isfinite(scale) & (scale > 0))][0].item()
        raise BadTensorValue(
            f"{name} holds {worst}; a scale must be positive and finite",
            fix="calibrate again with varied text; a zero scale means the tensor was all zero",
        )
    return scale


def require_finite(name: str, chunk: torch.Tensor, what: str) -> None:
    """Raise BadTensorValue ("<name> <what>") where a chunk of any float dtype is not finite."""
    import torch

    # One pass for the extremes: 20 times faster than testing every element (isfinite).
    if chunk.dtype == torch.float8_e4m3fn:  # no infinity; NaN is 0x7F or 0xFF
        is_bad = bool(chunk.view(torch.int8).max() == 0x7F)
        is_bad = is_bad or bool(chunk.view(torch.uint8).max() == 0xFF)
    else:
        low, high = torch.aminmax(chunk)  # NaN propagates to both
        is_bad = not math.isfinite(low.item()) or not math.isfinite(high.item())
    if is_bad:
        raise BadTensorValue(
            f"{name} {what}",
            fix="fetch or export the checkpoint again; for float16 try --dtype bfloat16",
        )

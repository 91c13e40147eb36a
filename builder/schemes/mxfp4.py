"""Sources of MXFP4 weights: 4-bit codes and powers of two for blocks of 32, as ModelOpt
stores them, as E4M3 numbers with a scale for each row.

A block's power relative to its row's largest, and a code times that, are exact in E4M3 within 15
powers (plugins/schemes/mxfp4/packing.py). So the CPU multiplies FP8 weights, CUDA the same
4-bit numbers each. A block further below would round: it is refused unless all its codes
are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.builder.packing import CHUNK_BYTES, RowOrder, gather_rows
from llmctl.builder.schemes.reading import Parts, WeightReader
from llmctl.builder.sources import Source, TensorReader
from llmctl.errors import BadTensorValue
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.schemes.mxfp4.scheme import BLOCK, SCHEME, SPAN
from llmctl.plugins.schemes.scheme import E8M0_BIAS, Form

if TYPE_CHECKING:
    import torch

(_FORM,) = SCHEME.forms
_LARGEST = 6  # power of two of a row's largest blocks, as a step: 6 * 2**6 is 384 of E4M3's 448
_NAN = 255  # of E8M0
_SMALLEST = 7  # exponent of a row's largest block whose scale is a normal float32


@dataclass(frozen=True, slots=True)
class MxRows:
    """MXFP4 weights stacked along axis 0, as E4M3 [rows, K]."""

    parts: Parts  # (checkpoint name of the codes, (rows, K))

    @property
    def form(self) -> Form:
        return _FORM

    def packed(self, order: RowOrder) -> PackedMxRows:
        return PackedMxRows(self, order)

    def widened(self, columns: int) -> MxRows:
        return MxRows(tuple((name, (shape[0], columns)) for name, shape in self.parts))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for name, _ in self.parts for n in (name, f"{name}_scale"))

    @property
    def dtype(self) -> str:
        return FP8

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for _, shape in self.parts), self.parts[0][1][1])

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        from llmctl.plugins.schemes.mxfp4.packing import expand

        for name, (rows, inner) in self.parts:
            codes, scales = checkpoint.read(name), checkpoint.read(f"{name}_scale")
            step = max(1, CHUNK_BYTES // inner)
            for start in range(0, rows, step):
                piece = codes[start : start + step]
                steps = relative_steps(name, piece, scales[start : start + step])
                yield expand(piece, steps)


@dataclass(frozen=True, slots=True)
class MxRowScales:
    """What a row's numbers are multiplied with, float32 [rows]."""

    parts: tuple[tuple[str, int], ...]  # (checkpoint name of the codes, rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{name}_scale" for name, _ in self.parts)

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows for _, rows in self.parts),)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        for name in self.names:
            powers = _row_exponents(checkpoint.read(name)) - E8M0_BIAS - _LARGEST
            yield torch.exp2(powers.to(torch.float32))


@dataclass(frozen=True, slots=True)
class PackedMxRows:
    """The same weights as [RT, KT, 64, 136] of uint8, for the tensor core of a GPU."""

    rows: MxRows
    order: RowOrder

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows.names

    @property
    def dtype(self) -> str:
        return _FORM.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS

        tiles = self.order.padded_rows // TILE_ROWS
        chunks = -(-self.rows.shape[1] // _FORM.columns)
        return (tiles, chunks, TILE_ROWS, _FORM.row_elements)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        """Whole row tiles, about CHUNK_BYTES of E4M3 at a time."""
        from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
        from llmctl.plugins.schemes.mxfp4.packing import pack

        codes, steps = [], []
        for name, _ in self.rows.parts:
            codes.append(checkpoint.read(name))
            steps.append(relative_steps(name, codes[-1], checkpoint.read(f"{name}_scale")))
        order = self.order.indices()
        step = TILE_ROWS * max(1, CHUNK_BYTES // (TILE_ROWS * self.rows.shape[1]))
        for start in range(0, len(order), step):
            wanted = order[start : start + step]
            taken = (gather_rows(each, wanted, self.dtype) for each in (codes, steps))
            yield pack(*taken)


class Mxfp4Reader(WeightReader):
    """Codes and powers of two."""

    def numbers(self, parts: Parts) -> MxRows:
        return MxRows(parts)

    def row_scales(self, parts: Parts, scales: tuple[str, ...]) -> Source:
        return MxRowScales(tuple((name, shape[0]) for name, shape in parts))


def relative_steps(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, K / 32] from 0 to 14: powers of two of blocks, relative to their row's largest.

    codes uint8 [rows, K / 2], scales uint8 [rows, K / 32] (E8M0). Raises BadTensorValue for NaN,
    and for a block so far below its row's largest that E4M3 does not hold its numbers.
    """
    import torch

    if bool((scales == _NAN).any()):
        raise BadTensorValue(f"{name}_scale holds NaN", fix="quantize again, or fetch it again")
    below = _row_exponents(scales)[:, None] - scales.to(torch.int32)
    steps = SPAN - below
    if bool((steps < 0).any()):
        is_zero = (codes.view(len(codes), -1, BLOCK // 2) & 0x77).amax(dim=2) == 0
        lost = (steps < 0) & ~is_zero
        if bool(lost.any()):
            row, block = (int(i) for i in lost.nonzero()[0])
            raise BadTensorValue(
                f"{name}: block {block} of row {row} is 2**{int(below[row, block])} below the "
                f"row's largest; up to 2**{SPAN} is exact in E4M3",
                fix=f"quantize with `llmctl quantize --qformat {SCHEME.qformat}`, which rounds it",
            )
    return steps.clamp(min=0).to(torch.uint8)


def _row_exponents(scales: torch.Tensor) -> torch.Tensor:
    """int32 [rows]: the largest E8M0 exponent of each row."""
    import torch

    return scales.amax(dim=1).to(torch.int32).clamp(min=_SMALLEST)

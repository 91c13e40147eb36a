"""A weight scheme that no one needs: FP8 numbers stored with every bit flipped, as U8.

It is a second scheme whose packed weights are uint8, and all of it is in this file: its row in the
table of schemes, how it is quantized and read, and the packing of its codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from llmctl.builder.packing import PackedRows, RowOrder
from llmctl.builder.schemes.reading import Parts, WeightReader
from llmctl.builder.schemes.table import READERS
from llmctl.builder.sources import Rows, RowScales, Source, TensorReader
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.packed_linear import layout
from llmctl.plugins.schemes.scheme import Algorithm, Form, QuantizedScheme, Storage
from llmctl.plugins.schemes.table import FORMS, SCHEMES
from llmctl.quantize.schemes.fp8 import Fp8Writer
from llmctl.quantize.schemes.table import WRITERS
from llmctl.quantize.schemes.writing import ConfigGroup

FORM = Form(
    name="flipped",
    dtype="uint8",
    numbers=FP8,
    word="flipped",
    block_bytes=8192,
    columns=128,
    spread=112.0,
    macro="FLIPPED",
    packing=__name__,
)
SCHEME = QuantizedScheme(
    name="flipped",
    title="flipped FP8",
    weight_bytes=1.0,
    forms=(FORM,),
    algorithms=(Algorithm("FLIPPED_FP8", "tensor", "static"),),
    storage=Storage(dtype="U8"),
    activation_dtype=FP8,
    activations=("static",),
    qformat="flipped",
)


def register(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
    """The scheme's rows in every table; backends: that have products of it."""
    monkeypatch.setitem(SCHEMES, SCHEME.name, SCHEME)
    monkeypatch.setitem(FORMS, FORM.name, FORM)
    monkeypatch.setitem(WRITERS, SCHEME.name, FlippedWriter())
    monkeypatch.setitem(READERS, SCHEME.name, FlippedReader())
    for name in backends:
        schemes = (*BACKENDS[name].weight_schemes, SCHEME.name)
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], weight_schemes=schemes))


# ---- packing.py of the scheme's folder ----


def unpack(packed: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    return layout.unpack((~packed).view(torch.float8_e4m3fn), rows, inner)


# ---- quantize/schemes/ ----


class FlippedWriter(Fp8Writer):
    config_group: ConfigGroup = None

    def quantize(self, linear: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight, scale = super().quantize(linear, name)
        return ~weight.view(torch.uint8), scale


# ---- builder/schemes/ ----


class Flipping:
    """A checkpoint whose tensors read are numbers."""

    def __init__(self, checkpoint: TensorReader) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str) -> torch.Tensor:
        return (~self._checkpoint.read(name)).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class FlippedRows:
    rows: Rows

    @property
    def form(self) -> Form:
        return FORM

    def packed(self, order: RowOrder) -> Source:
        return PackedFlippedRows(PackedRows(self.rows, order))

    def widened(self, columns: int) -> FlippedRows:
        parts = tuple((name, (shape[0], columns)) for name, shape in self.rows.parts)
        return FlippedRows(Rows(parts, self.rows.dtype))

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows.names

    @property
    def dtype(self) -> str:
        return FP8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        return self.rows.chunks(Flipping(checkpoint))


@dataclass(frozen=True)
class PackedFlippedRows:
    packed: PackedRows

    @property
    def names(self) -> tuple[str, ...]:
        return self.packed.names

    @property
    def dtype(self) -> str:
        return FORM.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        for chunk in self.packed.chunks(Flipping(checkpoint)):
            yield ~chunk.view(torch.uint8)


class FlippedReader(WeightReader):
    def numbers(self, parts: Parts) -> FlippedRows:
        return FlippedRows(Rows(parts, FP8))

    def row_scales(self, parts: Parts, scales: tuple[str, ...]) -> Source:
        rows: Mapping[str, int] = {
            scale: shape[0] for scale, (_, shape) in zip(scales, parts, strict=True)
        }
        return RowScales(tuple(rows.items()))

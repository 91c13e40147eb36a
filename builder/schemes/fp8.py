"""Sources of FP8 weights: as they are stored, and one scale per row."""

from __future__ import annotations

from llmctl.builder.schemes.reading import Parts, WeightReader
from llmctl.builder.sources import Rows, RowScales, Source
from llmctl.plugins.core.op_spec import FP8


class Fp8Reader(WeightReader):
    """E4M3 numbers with one scale per tensor or per row."""

    def numbers(self, parts: Parts) -> Rows:
        return Rows(parts, FP8)

    def row_scales(self, parts: Parts, scales: tuple[str, ...]) -> Source:
        rows = (shape[0] for _, shape in parts)
        return RowScales(tuple(zip(scales, rows, strict=True)))

"""What the builder asks of a scheme: how a checkpoint's tensors become the weights of a network."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from llmctl.builder.packing import RowOrder
from llmctl.builder.sources import Rows, Source
from llmctl.plugins.schemes.scheme import Form

Parts = tuple[tuple[str, tuple[int, ...]], ...]  # (name of the stored weight, (rows, columns))


@runtime_checkable
class CodedRows(Source, Protocol):
    """A linear's weight that is stored as codes. Its chunks are the numbers, which every backend
    multiplies; packed, it stays codes."""

    @property
    def form(self) -> Form:
        """What the packed weight is made of."""

    def packed(self, order: RowOrder) -> Source:
        """The same weight, packed with its rows in this order."""

    def widened(self, columns: int) -> CodedRows:
        """The same tensors with so many columns: a whole weight, of which a rank has a part."""


class WeightReader(Protocol):
    """Reads the weights of one scheme. A merged linear has several parts along its rows."""

    def numbers(self, parts: Parts) -> Rows | CodedRows:
        """What products multiply, [rows, columns]."""

    def row_scales(self, parts: Parts, scales: tuple[str, ...]) -> Source:
        """float32 [rows]: what their sums are multiplied with. scales: of each part, by name."""

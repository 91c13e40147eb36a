"""Weight sources in packed form: the rows of a linear layer reordered, tiled and swizzled for the
tensor core.

`plugins/ops/packed_linear/layout.py` defines the layout. Rows are gathered tile by tile from the
checkpoint's tensors, so writing an engine holds a few tiles of one weight and never all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmctl.builder.sources import Rows, Source, TensorReader, require_finite
from llmctl.plugins.core.op_spec import FP8

if TYPE_CHECKING:
    import torch

# Below what malloc maps anew each time (32 MiB): fresh pages cost several times the packing itself.
CHUNK_BYTES = 4 << 20
ITEM_BYTES = {"bfloat16": 2, "float16": 2, FP8: 1}  # what tensor cores multiply here


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of logical rows in the packed weight: "plain" (rows), "pair" (width) for gate and
    up, "rope" (num_heads, num_kv_heads, head_size) for q, k and v."""

    kind: Literal["plain", "pair", "rope"]
    sizes: tuple[int, ...]

    def indices(self) -> torch.Tensor:
        """int64, a multiple of 64 long: packed row i holds logical row [i]; -1 is padding."""
        from llmctl.plugins.ops.packed_linear import layout

        if self.kind == "pair":
            return layout.pair_order(*self.sizes)
        if self.kind == "rope":
            return layout.rope_order(*self.sizes)
        return layout.plain_order(*self.sizes)

    @property
    def padded_rows(self) -> int:
        """Rows with the padding."""
        if self.kind == "rope":
            heads, kv_heads, size = self.sizes
            rows = (heads + 2 * kv_heads) * size
        else:
            rows = self.sizes[0] * (2 if self.kind == "pair" else 1)
        return -(-rows // 64) * 64


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A weight [rows, K] as [RT, KT, 64, C]. leaves: of a product whose K is added in so many
    parts, each of which has rows of its own: [leaves * rows, K / leaves]."""

    rows: Rows
    order: RowOrder
    leaves: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows.names

    @property
    def dtype(self) -> str:
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        from llmctl.plugins.ops.packed_linear.layout import packed_shape

        rows, inner = self.rows.shape
        item = ITEM_BYTES[self.dtype]
        return packed_shape(self.leaves * rows, inner // self.leaves, item)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        """Whole row tiles, about CHUNK_BYTES at a time."""
        from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
        from llmctl.plugins.ops.packed_linear.layout import pack

        order = self.order.indices()
        step = TILE_ROWS * max(
            1, CHUNK_BYTES // math.prod((*self.shape[1:], ITEM_BYTES[self.dtype]))
        )
        parts, width = [checkpoint.read(name) for name in self.names], self._leaf_width
        for leaf in range(self.leaves):
            own = [part.narrow(1, leaf * width, width) for part in parts]
            for start in range(0, len(order), step):
                wanted = order[start : start + step]
                yield pack(gather_rows(own, wanted, self.dtype, self._convert))

    @property
    def _leaf_width(self) -> int:
        return self.rows.shape[1] // self.leaves

    def _convert(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a part in this dtype, checked."""
        import torch

        name, dtype = self.names[part], getattr(torch, self.dtype)
        require_finite(name, rows, "holds NaN or infinity")
        if rows.dtype == dtype:
            return rows
        converted: torch.Tensor = rows.to(dtype)
        require_finite(name, converted, f"has values that do not fit {self.dtype}")
        return converted


@dataclass(frozen=True, slots=True)
class PackedVector:
    """A bias or the weight scales of a packed linear, in the order of its rows; padding is 0."""

    vector: Source
    order: RowOrder

    @property
    def names(self) -> tuple[str, ...]:
        return self.vector.names

    @property
    def dtype(self) -> str:
        return self.vector.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.order.padded_rows,)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        from llmctl.plugins.ops.packed_linear.layout import reorder

        yield reorder(torch.cat(list(self.vector.chunks(checkpoint))), self.order.indices())


def gather_rows(
    parts: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    dtype: str,
    convert: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, rows: rows,
) -> torch.Tensor:
    """The rows `wanted` (int64) of parts that lie one after the other, zeros for -1. convert(index
    of a part, its rows) makes rows of `dtype`."""
    import torch

    shape = (len(wanted), parts[0].shape[1])
    gathered = torch.zeros(shape, dtype=getattr(torch, dtype))
    first = 0
    for index, stored in enumerate(parts):
        here = ((wanted >= first) & (wanted < first + len(stored))).nonzero().flatten()
        if len(here):
            rows = _words(stored).index_select(0, wanted[here] - first).view(stored.dtype)
            _words(gathered).index_copy_(0, here, _words(convert(index, rows)))
        first += len(stored)
    return gathered


def _words(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, ...] as the widest integers that divide its rows: torch moves these, and FP8 as such
    it does not."""
    import torch

    is_even = matrix.shape[1] * matrix.itemsize % 8 == 0
    is_aligned = matrix.storage_offset() * matrix.itemsize % 8 == 0
    return matrix.view(torch.int64 if is_even and is_aligned else torch.uint8)

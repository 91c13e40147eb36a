"""The memory layout of weights for the packed matrix products.

A packed weight is [RT, KT, 64, C]: 64-row tiles, then chunks of 128 bytes of K (C elements). Each
[64, 128 bytes] block is 8 KiB, contiguous, and already has the 128-byte swizzle that wgmma reads:
the 16-byte piece c of row r is stored at piece c XOR (r mod 8). So one bulk copy loads a block, and
shared memory needs no further arrangement. Rows and columns beyond the matrix are zero. Blocks of
weights that are codes have another form, which their scheme describes (plugins/schemes/).

Rows are packed in a special order, so that values which an epilogue combines are in the same
thread: the accumulator of a thread holds rows r and r + 8 of every group of 16.
"""

from __future__ import annotations

import torch

from llmctl.plugins.ops.packed_linear.forms import CHUNK_BYTES, TILE_ROWS
from llmctl.plugins.schemes.scheme import Form, packing_of

_PIECES = 8  # 16-byte pieces of a chunk
PIECE = torch.complex128  # the dtype of 16 bytes; pieces are only ever moved
_GROUP = 16  # rows of one warp in a tile


def packed_shape(rows: int, inner: int, itemsize: int) -> tuple[int, int, int, int]:
    """Shape of the packed form of a weight [rows, inner] with elements of `itemsize` bytes."""
    columns = CHUNK_BYTES // itemsize
    return -(-rows // TILE_ROWS), -(-inner // columns), TILE_ROWS, columns


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [rows, K] in packed row order -> [RT, KT, 64, C] of the same dtype and device."""
    rows, inner = weight.shape
    tiles, chunks, _, columns = packed_shape(rows, inner, weight.element_size())
    padded = weight.contiguous().view(torch.uint8)
    shape = (tiles * TILE_ROWS, chunks * CHUNK_BYTES)
    if padded.shape != shape or padded.storage_offset() % PIECE.itemsize:
        source, padded = padded, padded.new_zeros(shape)
        padded[:rows, : source.shape[1]] = source
    blocks = padded.view(PIECE).view(tiles, TILE_ROWS, chunks, _PIECES).transpose(1, 2)
    packed = _swizzle(blocks).view(weight.dtype)
    return packed.view(tiles, chunks, TILE_ROWS, columns)


def numbers_of(packed: torch.Tensor, rows: int, inner: int, form: Form) -> torch.Tensor:
    """What a packed weight of a form stands for: [rows, inner] in packed row order."""
    return (packing_of(form).unpack if form.is_coded else unpack)(packed, rows, inner)


def unpack(packed: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    """packed [RT, KT, 64, C] of numbers -> weight [rows, inner] in packed row order."""
    tiles, chunks, _, columns = packed.shape
    raw = packed.contiguous().view(torch.uint8)
    if raw.storage_offset() % PIECE.itemsize:
        raw = raw.clone()
    blocks = raw.view(PIECE).view(tiles, chunks, TILE_ROWS, _PIECES)
    padded = _swizzle(blocks).transpose(1, 2).reshape(tiles * TILE_ROWS, chunks * _PIECES)
    return padded.view(packed.dtype)[:rows, :inner].contiguous()


def _swizzle(blocks: torch.Tensor) -> torch.Tensor:
    """Exchange the pieces of [..., 64, 8]; it is its own inverse. The result is contiguous."""
    rows = torch.arange(TILE_ROWS, device=blocks.device)[:, None]
    pieces = torch.arange(_PIECES, device=blocks.device)[None, :] ^ (rows % _PIECES)
    return blocks[..., rows, pieces].contiguous()


def plain_order(rows: int) -> torch.Tensor:
    """Packed row i holds logical row i; padding rows are -1. int64, a multiple of 64 long."""
    return _padded(torch.arange(rows))


def pair_order(width: int) -> torch.Tensor:
    """Order of [gate `width` rows | up `width` rows]: 8 gate rows, then the same 8 up rows."""
    if width % (_GROUP // 2):
        raise ValueError(f"the width is {width}; gate and up pair only in multiples of 8")
    gate = torch.arange(width).view(-1, 1, _GROUP // 2)
    return _padded(torch.cat((gate, gate + width), dim=1).flatten())


def rope_order(num_heads: int, num_kv_heads: int, head_size: int) -> torch.Tensor:
    """Order of [q heads | k heads | v heads]: 8 dimensions, then the 8 they rotate with.

    Value heads, which do not rotate, keep their order.
    """
    half = head_size // 2
    if head_size % _GROUP:
        raise ValueError(f"the head size is {head_size}; it must be a multiple of {_GROUP}")
    first = torch.arange(half).view(-1, 1, _GROUP // 2)
    head = torch.cat((first, first + half), dim=1).flatten()
    rotated = num_heads + num_kv_heads
    heads = torch.arange(rotated).view(-1, 1) * head_size + head
    values = torch.arange(num_kv_heads * head_size) + rotated * head_size
    return _padded(torch.cat((heads.flatten(), values)))


def reorder(logical: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (or elements of a vector) in packed order; padding rows become zero."""
    order = order.to(logical.device)
    width = logical.element_size()
    raw = logical.contiguous().view(torch.uint8).view(len(logical), -1, width)
    taken = torch.where((order < 0)[:, None, None], 0, raw[order.clamp(min=0)])
    return taken.to(torch.uint8).view(logical.dtype).view(len(order), *logical.shape[1:])


def restore(packed: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (or elements) in logical order again, without the padding."""
    order = order.to(packed.device)
    where = torch.empty(int((order >= 0).sum()), dtype=torch.int64, device=packed.device)
    real = (order >= 0).nonzero().flatten()
    where[order[real]] = real
    raw = packed.contiguous().view(torch.uint8).view(len(packed), -1)
    return raw[where].view(packed.dtype).view(len(where), *packed.shape[1:])


def _padded(order: torch.Tensor) -> torch.Tensor:
    missing = -len(order) % TILE_ROWS
    return torch.cat((order, order.new_full((missing,), -1)))

"""MXFP4 weights for the packed matrix products, and the E4M3 numbers that they are.

MXFP4 (OCP Microscaling Formats 1.0, 5.3.3): codes E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign) in
blocks of 32 along K, each with a power of two. A row's powers are kept relative to the row: a step
s stands for 2**(s - 8), and what is left of the row's largest power goes to its float32 scale. So a
code times its block's power is an E4M3 number, exactly: 0.5 * 2**-8 is the smallest, 6 * 2**6 is
384 of 448. Kernels expand codes to these numbers on the way to the tensor core and multiply them as
any FP8 weight: the products, the order of their sums and so every bit are those of an FP8 product.

Packed [RT, KT, 64, 136] of uint8: blocks of 64 rows by 256 of K, which are eight times 8 rows:
1,024 bytes of codes, then a byte for each row and block of 32. Codes are words of eight, in the
order in which the threads of a warp hold a wgmma operand: thread 4 g + t has, of row g, the four
columns from 32 i + 4 t and the four from 32 i + 16 + 4 t of block i. Nibbles 0 to 3 and 4 to 7 are
their magnitudes; the sign of column j of the first four is bit 8 j + 7 and of the others bit
8 j + 3, where one AND brings all four to the places of E4M3 signs. A thread's words of four blocks
lie side by side, 16 bytes.
"""

from __future__ import annotations

import torch

from llmctl.plugins.schemes.mxfp4.scheme import BLOCK, CHUNK_COLUMNS, ROW_BYTES

NUM_STEPS = 15
_OCTET = 8  # rows that are packed together
OCTET_BYTES = _OCTET * ROW_BYTES
OCTET_CODES = _OCTET * CHUNK_COLUMNS // 2  # bytes of codes, ahead of the steps
STEP_BYTES = 8  # a step is stored times this: the offset of its eight numbers in a kernel's table
UNIT_STEP = 8  # of 2**0
RANDOM_STEPS = (12, 15)  # of random weights: from, up to but not including
_PIECE_VALUES = 1 << 25  # of a random weight made at a time
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1 codes


def table() -> torch.Tensor:
    """uint8 [15, 8]: the E4M3 number of every magnitude at every step."""
    powers = 2.0 ** torch.arange(-8, NUM_STEPS - 8)
    numbers = powers[:, None] * torch.tensor(_MAGNITUDES)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def expand(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """E4M3 [rows, K] of codes uint8 [rows, K / 2], the even column in the low nibble, and steps
    uint8 [rows, K / 32] from 0 to 14."""
    nibbles = _nibbles(codes)
    which = steps.repeat_interleave(BLOCK, 1).int() * 8 + (nibbles & 7)
    numbers = table().to(codes.device).flatten()[which]
    return (numbers | (nibbles & 8) << 4).view(torch.float8_e4m3fn)


def pack(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """codes uint8 [rows, K / 2] and steps uint8 [rows, K / 32], rows in packed order ->
    [RT, KT, 64, 136]. Rows and columns beyond the matrix are zero."""
    rows, inner = codes.shape[0], 2 * codes.shape[1]
    tiles, chunks = -(-rows // 64), -(-inner // CHUNK_COLUMNS)
    nibbles = codes.new_zeros((tiles * 64, chunks * CHUNK_COLUMNS))
    nibbles[:rows, :inner] = _nibbles(codes)
    # half of four blocks, block, side (columns from 0 or from 16), thread of a row, column
    split = nibbles.view(tiles, _OCTET, 8, chunks, 2, 4, 2, 4, 4)
    magnitudes, signs = split & 7, split >> 3
    pairs = (magnitudes[..., 0::2] | magnitudes[..., 1::2] << 4).transpose(-3, -2)
    words = pairs.flatten(-2) | signs[..., 0, :, :] << 7 | signs[..., 1, :, :] << 3
    # [tile, octet, row, chunk, half, block, thread, byte] -> a thread's four words side by side
    ordered = words.permute(0, 3, 1, 4, 2, 6, 5, 7).reshape(tiles, chunks, _OCTET, -1)
    offsets = steps.new_zeros((tiles * 64, chunks * CHUNK_COLUMNS // BLOCK))
    offsets[:rows, : steps.shape[1]] = steps * STEP_BYTES
    offsets = offsets.view(tiles, _OCTET, 8, chunks, 8).permute(0, 3, 1, 2, 4)
    packed = torch.cat((ordered, offsets.reshape(tiles, chunks, _OCTET, -1)), dim=-1)
    return packed.view(tiles, chunks, 64, ROW_BYTES)


def half_codes(weight: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, K / 2] of a weight [rows, K] of multiples of 1/2 from -1.5 to 1.5, with
    powers of 1; exact."""
    nibbles = (weight.abs() * 2).to(torch.uint8) + (weight < 0).to(torch.uint8) * 8
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def pack_halves(weight: torch.Tensor) -> torch.Tensor:
    """A weight [rows, K] of multiples of 1/2 from -1.5 to 1.5, packed; exact."""
    shape = (weight.shape[0], weight.shape[1] // BLOCK)
    steps = torch.full(shape, UNIT_STEP, dtype=torch.uint8, device=weight.device)
    return pack(half_codes(weight), steps)


def pack_random(order: torch.Tensor, inner: int, generator: torch.Generator) -> torch.Tensor:
    """Arbitrary codes and steps [len(order), inner], packed; rows where order is -1 are zero."""
    device = order.device
    shapes = (len(order), inner // 2), (len(order), inner // BLOCK)
    codes = torch.randint(0, 256, shapes[0], generator=generator, device=device)
    steps = torch.randint(4, 14, shapes[1], generator=generator, device=device)
    is_padding = (order < 0)[:, None]
    codes, steps = (each.masked_fill(is_padding, 0).to(torch.uint8) for each in (codes, steps))
    return pack(codes, steps)


def fill_random(packed: torch.Tensor, generator: torch.Generator) -> None:
    """Random codes and steps in a packed weight, in place: numbers of the form's spread."""
    device = packed.device
    for part in torch.split(packed.view(-1, OCTET_BYTES), _PIECE_VALUES // OCTET_BYTES):
        codes, steps = part[:, :OCTET_CODES], part[:, OCTET_CODES:]
        drawn = torch.randint(0, 256, codes.shape, generator=generator, device=device)
        codes.copy_(drawn)
        drawn = torch.randint(*RANDOM_STEPS, steps.shape, generator=generator, device=device)
        steps.copy_(drawn * STEP_BYTES)


def unpack(packed: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    """[RT, KT, 64, 136] -> the E4M3 weight [rows, inner] in packed row order."""
    tiles, chunks = packed.shape[:2]
    octets = packed.reshape(tiles, chunks, _OCTET, OCTET_BYTES)
    stored = octets[..., :OCTET_CODES]
    words = stored.reshape(tiles, chunks, _OCTET, 2, 8, 4, 4, 4).permute(0, 2, 4, 1, 3, 6, 5, 7)
    signs = torch.stack((words >> 7 & 1, words >> 3 & 1), dim=-3)  # [..., block, side, thread, col]
    nibbles = torch.stack((words & 7, words >> 4 & 7), dim=-1).flatten(-2)  # [..., thread, 8]
    magnitudes = nibbles.view(*nibbles.shape[:-1], 2, 4).transpose(-3, -2)
    codes = (magnitudes | signs << 3).reshape(tiles * 64, chunks * CHUNK_COLUMNS)
    offsets = octets[..., OCTET_CODES:]
    steps = offsets.reshape(tiles, chunks, _OCTET, 8, 8).permute(0, 2, 3, 1, 4)
    steps = steps.reshape(tiles * 64, chunks * 8) // STEP_BYTES
    return expand(codes[:, 0::2] | codes[:, 1::2] << 4, steps)[:rows, :inner].contiguous()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, K] of two codes a byte, the low nibble first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)

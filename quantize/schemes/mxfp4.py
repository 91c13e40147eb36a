"""MXFP4 weights: E2M1 codes in blocks of 32 along the input dimension, one E8M0 scale a block.

A value is code * 2^(scale - 127); two codes share a byte, the even column in its low nibble (OCP
Microscaling Formats specification, sections 5.3 and 5.4). A block's exponent is
ceil(log2(largest / 6)), at least -127, so nothing saturates; a tie between two codes goes to the
smaller. ModelOpt's own MXFP4QTensor computes both, so the bits are those of its export (a test
compares every tensor).

Different from ModelOpt in one place: no block's exponent is more than 14 below the largest of its
row. An engine multiplies in float8_e4m3fn, and only within that span is every code times its
block's scale, relative to the row, an E4M3 number: from 0.5 * 2^-8, the smallest, to 6 * 2^6 = 384
(448 is the largest). A block below is quantized again with the lowest exponent allowed, where most
of its values round to zero: by less than 1/98304 of the row's largest. Assumed: finite weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmctl.plugins.schemes.mxfp4.scheme import BLOCK, SPAN
from llmctl.plugins.schemes.scheme import E8M0_BIAS
from llmctl.quantize.schemes.writing import ConfigGroup, WeightWriter

if TYPE_CHECKING:
    import torch

# ModelOpt compares each value with seven borders at once, about 100 bytes a value; in pieces of
# this many values that stays within the processor's cache and within WORK_BYTES.
PIECE_VALUES = 1 << 18
WORK_BYTES = 100 * PIECE_VALUES


class Mxfp4Writer(WeightWriter):
    """Codes and powers of two, from the weight alone."""

    config_group: ConfigGroup = None  # ModelOpt's converter leaves it to the name of quant_algo
    work_bytes = WORK_BYTES

    def quantize(self, linear: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_blocks(linear.weight.detach())

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return expand(weight, scale)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [out, in / 2], scales uint8 [out, in / 32]) of a float weight [out, in].

    in must be a multiple of 32, which the plan has checked.
    """
    import torch

    rows, columns = weight.shape
    codes = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    scales = weight.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    piece_rows = max(1, PIECE_VALUES // columns)
    pieces = zip(*(torch.split(t, piece_rows) for t in (weight, codes, scales)), strict=True)
    for piece, piece_codes, piece_scales in pieces:
        found_codes, found_scales = _modelopt_blocks(piece, BLOCK)
        piece_codes.copy_(found_codes)
        piece_scales.copy_(found_scales.view(piece_scales.shape))
        _raise_low_blocks(piece, piece_codes, piece_scales)
    return codes, scales


def expand(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of codes [out, in / 2] with scales [out, in / 32]: float32 [out, in]."""
    import torch

    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)  # E2M1 without sign
    values = torch.cat([sizes, -sizes])
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).long()
    blocks = values[pairs].view(*scales.shape, BLOCK)
    exponents = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(blocks, exponents.unsqueeze(-1)).view(len(codes), -1)


def _raise_low_blocks(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize again, in place, the blocks too far below their row's largest exponent.

    weight [rows, in], codes [rows, in / 2], scales [rows, in / 32]. Blocks of nothing but zeros
    keep their scale, and so does every block of a row without any value.
    """
    import torch

    floor = scales.amax(dim=1, keepdim=True).int() - SPAN
    has_values = ((codes & 0x77) != 0).view(*scales.shape, BLOCK // 2).any(dim=-1)
    is_low = (scales.int() < floor) & has_values
    if not is_low.any():
        return
    blocks = weight.view(*scales.shape, BLOCK)[is_low].float()
    exponents = (floor.expand_as(scales)[is_low] - E8M0_BIAS).float()
    # ModelOpt takes the exponent from the largest value of a block, so that two more values, the
    # first of which asks for the wanted exponent (from 3 to 6 times its power), make it round
    # these blocks too. They share the last byte of each.
    guide = torch.stack([5 * exponents.exp2(), torch.zeros_like(exponents)], dim=1)
    guided_codes, guided_scales = _modelopt_blocks(torch.cat([blocks, guide], dim=1), BLOCK + 2)
    codes.view(*scales.shape, BLOCK // 2)[is_low] = guided_codes[:, : BLOCK // 2]
    scales[is_low] = guided_scales.view(-1)


def _modelopt_blocks(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [rows, columns / 2], scales [rows * columns / block, 1]) of values [rows, columns]."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    quantized, scales = MXFP4QTensor.quantize(values, block)
    return quantized._quantized_data, scales

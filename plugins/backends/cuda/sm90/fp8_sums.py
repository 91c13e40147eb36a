"""The sums of Hopper's FP8 products (wgmma with E4M3 operands), bit by bit, on any device.

One instruction adds 32 products and the running sum at once. All are cut, towards zero, to
multiples of 2^(e - 13), where e is the largest exponent among them; that of a product is the sum
of its factors' exponents, so its significand is less than 4. What they add up to is exact, and is
then cut to 14 significant bits. So the order of the 32 does not matter, and that of the
instructions does. A left operand in registers, fewer columns, or operands that change places give
the same bits; `mma.sync` does not: on compute capability 9.0 it converts to float16 and
multiplies in 16 bits.

Checked against an H200 by tests/gpu/test_fp8_products.py.
"""

from __future__ import annotations

import torch

PRODUCTS_AT_ONCE = 32
FRACTION_BITS = 13
_LEAST_EXPONENT = -6  # of an E4M3 number; that of a subnormal one, too
_NONE = -1000  # of zeros, which count no more than other small numbers


def add_products(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sums [M, N] float32 + a [M, K] b [N, K]^T, both float8_e4m3fn without NaN -> [M, N] float32.

    K is a multiple of 32; its products are added in ascending order, 32 at a time.
    """
    depth = a.shape[1]
    if depth % PRODUCTS_AT_ONCE or b.shape[1] != depth:
        raise ValueError(
            f"operands of {depth} and {b.shape[1]} columns; wanted the same multiple of 32"
        )
    left, right = a.float(), b.float()
    for first in range(0, depth, PRODUCTS_AT_ONCE):
        own = slice(first, first + PRODUCTS_AT_ONCE)
        sums = _add_at_once(sums, left[:, None, own], right[None, :, own])
    return sums


def _add_at_once(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    products = left * right
    exponents = torch.where(
        products == 0, _NONE, _exponent_of_factor(left) + _exponent_of_factor(right)
    ).amax(-1)
    own = torch.where(sums == 0, _NONE, torch.frexp(sums).exponent - 1)
    unit = FRACTION_BITS - torch.maximum(exponents, own)
    # Below 2^15 each, so float32 adds them exactly.
    parts = torch.ldexp(products, unit[..., None]).trunc().sum(-1)
    return _cut(torch.ldexp(parts + torch.ldexp(sums, unit).trunc(), -unit))


def _exponent_of_factor(x: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(x).exponent - 1).clamp(min=_LEAST_EXPONENT)


def _cut(x: torch.Tensor) -> torch.Tensor:
    """Towards zero, to 14 significant bits."""
    mask = ~((1 << (23 - FRACTION_BITS)) - 1)
    return (x.view(torch.int32) & mask).view(torch.float32)

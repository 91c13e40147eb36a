"""The model of FP8 tensor cores gives what an H200 gave (tests/gpu/test_fp8_products.py compares
many more) and refuses other depths."""

from __future__ import annotations

import pytest
import torch

from llmctl.plugins.backends.cuda.sm90.fp8_sums import add_products

# 32 numbers of each operand, the sum before and after: as an H200 computed them.
SEEN = [
    (
        "25eb8c480089cb854fc09081cc47edfc8619b214fe6592d48bfcea9c9d8e3244",
        "256b0f048ff408302442cd92e3aca68b9d604905dd9e2c81f9a684f575a06e55",
        "-0x1.450032p+16",
        "-0x1.33fp+16",
    ),
    (
        "f8fdcd0634d5c6024cdb95cb074dc84b4c2b141e2467072dc439f0fcd2600d0a",
        "04223b874ba813441b78576b0580d22c35b65877c39d6d9524a735bf7510dfe7",
        "-0x1.47a22cp+15",
        "-0x1.82ep+15",
    ),
    (
        "596f446968536861695b725f537267772859555947777053726c5e6c546f6a43",
        "2f1e2f2ebbb3b634a225b9b811233f373340b9b2953ac2333b2baebfba2b35ba",
        "-0x1.f25ef2p+7",
        "-0x1.87p+4",
    ),
    (
        "774e755a5f6a78685b2d3951636a5676606d466d7568664a6a725e636172594f",
        "b8b22d2ebe30b5a0403384243e9ba733ba3d9c28a5aa2ab9b61a222924ba34a6",
        "0x1.1870dp+9",
        "0x1.4a4p+8",
    ),
]


def e4m3(*rows: str) -> torch.Tensor:
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )


def numbers(rows: int, depth: int, seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return (20 * torch.randn(rows, depth, generator=make)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("a", "b", "before", "after"), SEEN)
def test_sums_are_those_of_an_h200(a, b, before, after):
    start = torch.tensor([[float.fromhex(before)]])
    assert add_products(start, e4m3(a), e4m3(b)).item() == float.fromhex(after)


def test_order_matters_between_products_of_32_alone():
    a, b = numbers(8, 128, 1), numbers(8, 128, 2)
    zeros = torch.zeros(8, 8)
    wanted = add_products(zeros, a, b)

    def ordered(places: torch.Tensor) -> torch.Tensor:
        parts = [x.view(torch.uint8)[:, places.flatten()].view(x.dtype) for x in (a, b)]
        return add_products(zeros, *parts)

    places = torch.arange(128).view(4, 32)
    assert torch.equal(ordered(places.flip(1)), wanted)
    assert not torch.equal(ordered(places.flip(0)), wanted)
    assert torch.equal(add_products(zeros, b, a), wanted.T), "operands may change places"


def test_sums_are_near_the_exact_ones():
    a, b = numbers(16, 512, 3), numbers(16, 512, 4)
    exact = a.double() @ b.double().T
    # Each of 33 parts of 16 instructions is cut to a multiple of less than 2^-13 of the largest.
    most = 16 * 33 * 2.0**-13 * torch.maximum(exact.abs().max(), (a.double().abs().max() ** 2))
    found = add_products(torch.zeros(16, 16), a, b)
    assert (found - exact).abs().max() < most
    assert not torch.equal(found, exact.float())
    assert (found.view(torch.int32) & 1023 == 0).all()


def test_a_small_product_beside_a_large_sum_is_lost():
    one, tiny = torch.zeros(1, 32), torch.zeros(1, 32)
    one[0, 5], tiny[0, 5] = 1.0, 1.75
    start = torch.tensor([[2.0**14]])
    assert add_products(start, one.to(torch.float8_e4m3fn), tiny.to(torch.float8_e4m3fn)) == 2**14
    half = add_products(start / 2, one.to(torch.float8_e4m3fn), tiny.to(torch.float8_e4m3fn))
    assert half == 2**13 + 1


def test_zeros_do_not_count_whatever_they_are_multiplied_by():
    a, b = torch.zeros(1, 64), torch.full((1, 64), 448.0)
    a[0, 3], b[0, 3] = 2.0**-9, 2.0**-9
    operands = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    assert add_products(torch.zeros(1, 1), *operands).item() == 2.0**-18
    start = torch.tensor([[2.0**-30]])
    nothing = torch.zeros(1, 64).to(torch.float8_e4m3fn)
    assert add_products(start, nothing, operands[1]) == start
    assert add_products(torch.zeros(1, 1), nothing, nothing) == 0


@pytest.mark.parametrize(("depth", "other"), [(31, 31), (64, 32), (48, 48)])
def test_other_depths_are_refused(depth, other):
    with pytest.raises(ValueError, match=f"{depth} and {other} columns; wanted the same multiple"):
        add_products(torch.zeros(2, 2), numbers(2, depth, 1), numbers(2, other, 2))

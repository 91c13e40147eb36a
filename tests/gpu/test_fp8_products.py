"""wgmma of E4M3 numbers gives the bits of `fp8_sums` in each of its forms; mma.sync does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.backends.cuda.sm90.fp8_sums import add_products

ROWS, COLUMNS = 64, 128  # of the source's product
FORMS = {"shared": 0, "registers": 1, "eight columns": 2, "transposed": 3}  # its WAY
MMA_SYNC = 4
Multiply = Callable[..., torch.Tensor]


@pytest.fixture
def multiply(repository) -> Multiply:
    """start + a b^T by one form of the instruction."""

    def run(way: int, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        depth, sums = a.shape[1], start.clone()
        spec = KernelSpec(
            f"fp8_products.{way}.{depth}",
            str(repository / "tests" / "support" / "cuda_samples" / "fp8_products.cu"),
            ("*fp8e4nv", "*fp8e4nv", "*fp32"),
            {"WAY": way, "DEPTH": depth},
            "multiply",
            shared_bytes=(ROWS + COLUMNS) * depth,
        )
        loaded = cuda_driver().load(compile_kernel(spec))
        stream = torch.cuda.current_stream().cuda_stream
        cuda_driver().prepare(loaded, (1, 1, 1), (a, b, sums), False)(stream)
        torch.cuda.synchronize()
        return sums

    return run


def numbers(kind: str, rows: int, depth: int, seed: int) -> torch.Tensor:
    """E4M3 numbers [rows, depth] on the GPU."""
    make = torch.Generator("cuda").manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, depth, generator=make, device="cuda")

    if kind == "normal":
        wide = 30 * normal()
    elif kind == "weights":  # of a softmax, up to 256
        wide = 256 * torch.exp2(-4 * normal().abs())
    else:  # of all magnitudes
        wide = torch.exp2(5 * normal()) * normal().sign()
    if kind == "few":  # small ones beside zeros
        wide = torch.where(normal() > 1.3, wide * 2**-9, 0.0)
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn)


KINDS = [
    ("all", "all"),
    ("normal", "normal"),
    ("weights", "normal"),
    ("few", "few"),
    ("few", "all"),
]


@pytest.mark.parametrize("depth", [128, 512])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_every_form_gives_the_bits_of_the_model(multiply, kinds, depth):
    a, b = numbers(kinds[0], ROWS, depth, 1), numbers(kinds[1], COLUMNS, depth, 2)
    zeros = torch.zeros(ROWS, COLUMNS, device="cuda")
    start = torch.randn(ROWS, COLUMNS, device="cuda") * (a.float() @ b.float().T).abs().mean()
    for first in (zeros, start):
        wanted = add_products(first, a, b)
        for form, way in FORMS.items():
            found = multiply(way, a, b, first)
            assert torch.equal(found, wanted), form


def test_the_order_within_32_does_not_matter_and_that_of_32s_does(multiply):
    a, b = numbers("all", ROWS, 512, 1), numbers("all", COLUMNS, 512, 2)
    zeros = torch.zeros(ROWS, COLUMNS, device="cuda")
    wanted = multiply(0, a, b, zeros)

    def ordered(order: torch.Tensor) -> torch.Tensor:
        parts = [x.view(torch.uint8)[:, order.flatten()].view(x.dtype) for x in (a, b)]
        return multiply(0, *parts, zeros)

    places = torch.arange(512, device="cuda").view(16, 32)
    assert torch.equal(ordered(places[:, torch.randperm(32)]), wanted)
    assert not torch.equal(ordered(places.flip(0)), wanted)


def test_mma_sync_has_other_sums(multiply):
    """It multiplies in 16 bits on compute capability 9.0: it cannot stand in for wgmma."""
    a, b = numbers("normal", ROWS, 128, 1), numbers("normal", COLUMNS, 128, 2)
    zeros = torch.zeros(ROWS, COLUMNS, device="cuda")
    found, exact = multiply(MMA_SYNC, a, b, zeros), a.double() @ b.double().T
    assert (found != multiply(0, a, b, zeros)).float().mean() > 0.5
    assert (found - exact).abs().max() < (multiply(0, a, b, zeros) - exact).abs().max() / 100

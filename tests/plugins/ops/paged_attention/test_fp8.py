"""The arithmetic of attention with FP8 products: near exact attention, and the same for a row
whatever else is computed."""

from __future__ import annotations

import math

import pytest
import torch

from llmctl.plugins.ops.paged_attention import reference
from llmctl.plugins.ops.paged_attention.chunk_fp8 import reference as fp8_reference
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import attend, quantize_queries

SIZE = 128
E4M3 = torch.float8_e4m3fn


def made(length: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries of the last 24 tokens, keys and values of all, positions. spread: of logits."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(24, SIZE, generator=make) * spread
    k, v = (torch.randn(length, SIZE, generator=make).to(E4M3) for _ in range(2))
    return q.bfloat16(), k, v, torch.arange(length - 24, length)


def exact(q, k, v, positions) -> torch.Tensor:
    wide = (x.double()[None] for x in (q, k, v))
    return reference.attention(*wide, positions, SIZE**-0.5, 0)[0]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean().item()


@pytest.mark.parametrize(("spread", "most"), [(0.5, 0.035), (1.0, 0.042), (2.0, 0.06), (4.0, 0.08)])
def test_it_is_near_exact_attention(spread, most):
    """Values have no mean here, so errors are large beside their sum; the sharper the weights, the
    more a rounded query moves them."""
    inputs = made(1500, spread)
    assert error(attend(*inputs, SIZE**-0.5), exact(*inputs)) < most


def test_rounded_weights_alone_move_a_sum_of_values_by_their_own_error():
    """With queries that E4M3 represents. Its numbers are off by some 2 % in the mean square, and
    sums of 512 of them by a little more than sums of 128."""
    q, k, v, positions = made(1500, 1.0)
    inputs = (q.to(E4M3).bfloat16(), k, v, positions)
    assert error(attend(*inputs, SIZE**-0.5), exact(*inputs)) < 0.026


def test_a_row_does_not_depend_on_others_or_on_keys_behind_it():
    q, k, v, positions = made(700, 2.0)
    wanted = attend(q, k, v, positions, 0.1)
    for row in (0, 7, 23):
        own, seen = slice(row, row + 1), int(positions[row]) + 1
        alone = attend(q[own], k[:seen], v[:seen], positions[own], 0.1)
        assert torch.equal(alone, wanted[own])


def test_the_order_of_keys_within_32_does_not_matter():
    q, k, v, _ = made(64, 1.0)
    everywhere = torch.full((len(q),), 64)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    places = torch.cat((order, 32 + order))

    def ordered(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8)[places].view(E4M3)

    found = attend(q, ordered(k), ordered(v), everywhere, 0.1)
    assert torch.equal(found, attend(q, k, v, everywhere, 0.1))


@pytest.mark.parametrize("largest", [448.0, 449.0, 0.75, 3.0, 2.0**-120, 0.0])
def test_queries_are_divided_by_the_smallest_power_of_two_that_fits(largest):
    q = torch.linspace(-1, 1, SIZE)[None] * largest
    rows, unit = quantize_queries(q)
    assert torch.frexp(unit).mantissa.item() == 0.5
    most = rows.float().abs().max().item()
    assert most <= 448 and (most >= 224 or largest < 2.0**-100)
    torch.testing.assert_close(rows.float() * unit, q, rtol=2**-4, atol=unit.item() * 2**-9)


def test_the_base_is_raised_only_by_logits_far_above_it(monkeypatch):
    """So no weight is above 448, where E4M3 ends: logits are 4 and 14 powers of two."""
    q = torch.zeros(1, SIZE)
    q[0, 0] = 1.0
    first = 16 * fp8_reference.KEYS  # of a work item of two tiles
    length = first + 2 * fp8_reference.KEYS
    k, v = torch.zeros(length, SIZE), torch.zeros(length, SIZE)
    k[first:, 0], k[first + 140 :, 0], v[first + 140 :] = 2.0, 7.0, 1.0
    inputs = (q, k.to(E4M3), v.to(E4M3), torch.tensor([length - 1]), 2 / math.log2(math.e))
    assert (attend(*inputs) > 0.99).all()
    monkeypatch.setattr(fp8_reference, "RAISE", 64.0)  # weights above 448 are cut
    assert (attend(*inputs) < 0.95).all()

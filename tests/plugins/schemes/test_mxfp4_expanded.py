"""mxfp4.cuh on a CPU: the operands that its threads make of codes."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.emulated_mxfp4 import compile_mxfp4

from llmctl.plugins.schemes.mxfp4.packing import NUM_STEPS, expand, pack

ROWS, INNER, BLOCK = 64, 256, 32


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return compile_mxfp4()


def operands(library: ctypes.CDLL, packed: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes [rows, columns] of what the threads hold."""
    held = torch.zeros(128, 8, 4, dtype=torch.int32)
    library.make_all(ctypes.c_void_p(packed.data_ptr()), ctypes.c_void_p(held.data_ptr()))
    # warp, row of eight, four columns, product | half of the product's columns, eight rows | byte
    threads = held.view(torch.uint8).view(4, 8, 4, 8, 2, 2, 4)
    return threads.permute(0, 5, 1, 3, 4, 2, 6).reshape(ROWS, INNER)


def test_operands_are_the_numbers_of_the_codes(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (ROWS, INNER // 2), generator=generator).to(torch.uint8)
    steps = torch.randint(0, NUM_STEPS, (ROWS, INNER // BLOCK), generator=generator)
    found = operands(library, pack(codes, steps.to(torch.uint8)))
    assert torch.equal(found, expand(codes, steps.to(torch.uint8)).view(torch.uint8))


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_every_code_at_every_step(library: ctypes.CDLL, step: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(ROWS // 2).view(ROWS, INNER // 2)
    steps = torch.full((ROWS, INNER // BLOCK), step, dtype=torch.uint8)
    found = operands(library, pack(codes, steps))
    assert torch.equal(found, expand(codes, steps).view(torch.uint8))


def test_magnitudes_are_moved_by_a_multiplication_that_keeps_them() -> None:
    """`upper_half` multiplies halves of words by one: all that magnitudes make are finite."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16) & 0x7777
    product = halves.view(torch.float16).numpy() * 1
    assert torch.equal(torch.from_numpy(product).view(torch.int16), halves)


def test_no_byte_of_a_slot_leads_outside_of_the_table(library: ctypes.CDLL) -> None:
    """As in slots that were not filled: the emulation's memory ends the process beyond its end."""
    packed = torch.full((1, 1, ROWS, 136), 255, dtype=torch.uint8)
    assert operands(library, packed).shape == (ROWS, INNER)

"""Rotary tables are correctly rounded, so that their bits are the same wherever they are made."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext
from hashlib import sha256

import numpy as np
import pytest
import torch

from llmctl.plugins.ops.rope_kv_write import table as rotary
from llmctl.plugins.ops.rope_kv_write.table import exact_cosine, exact_sine, fill_rotary_table

# Of bases 10,000 to 500,000, linear scaling, and the limits that plans are checked for.
FREQUENCIES = [float(np.float32(f)) for f in (1.0, 0.7, 0.31, 0.05, 0.003, 1e-5, 2.0, 3e-9)]
# Angles whose cosine (sine) lies within 3 units in the last place of float64 of the middle
# between two float32 numbers; found among a million positions of 64 frequencies.
HARD = [
    (exact_cosine, False, 49.89141082763672),
    (exact_cosine, False, 45.888397216796875),
    (exact_sine, True, 5397.46240234375),
]


def make(positions: int, factor: float = 1.0, start: int = 0) -> torch.Tensor:
    table = torch.empty(positions, 2 * len(FREQUENCIES))
    fill_rotary_table(table, FREQUENCIES, factor, start)
    return table


def test_the_bits_are_those_of_every_other_machine() -> None:
    digest = sha256(make(3000, 1.25).numpy().tobytes()).hexdigest()
    assert digest == "141c2d59b61aa274d30c32ebbcdec0f539bae9059a89350d49697ca5a41a80f9"


def test_every_entry_is_the_nearest_float32() -> None:
    table = make(64, start=131_000 - 64)
    for place in np.random.default_rng(0).integers(0, table.numel(), 300):
        row, column = divmod(int(place), table.shape[1])
        frequency = np.float32(FREQUENCIES[column % len(FREQUENCIES)])
        angle = float(np.float32(131_000 - 64 + row) * frequency)
        exact = (exact_cosine if column < len(FREQUENCIES) else exact_sine)(angle)
        found = np.float32(table[row, column].item())
        error = abs(Decimal(float(found)) - exact)
        for other in (np.nextafter(found, np.float32(-2)), np.nextafter(found, np.float32(2))):
            assert error <= abs(Decimal(float(other)) - exact)


@pytest.mark.parametrize(("exact", "is_sine", "angle"), HARD)
def test_a_value_near_the_middle_of_two_is_rounded_as_its_digits_say(
    exact, is_sine: bool, angle: float
) -> None:
    angles = torch.tensor([[angle]], dtype=torch.float64)
    value = np.float64(float(exact(angle)))
    found, naive = set(), set()
    for error in range(-4, 5):  # what a library may be wrong by, in units in the last place
        approximate = (np.array([[value]]).view(np.int64) + error).view(np.float64)
        given = torch.from_numpy(approximate)
        found.add(rotary._rounded(given, angles, is_sine=is_sine).item())
        naive.add(given.float().item())
    assert len(naive) == 2, "this angle is not hard"
    (rounded,) = found
    errors = {each: abs(Decimal(each) - exact(angle)) for each in naive}
    assert rounded == min(errors, key=errors.__getitem__)


def test_errors_of_a_library_change_nothing() -> None:
    angles = torch.arange(1, 4097, dtype=torch.float32)[:, None] * torch.tensor(FREQUENCIES)
    angles = angles.double()
    for is_sine, values in ((False, angles.cos()), (True, angles.sin())):
        wanted = rotary._rounded(values, angles, is_sine=is_sine)
        for error in (-4, 4):
            other = (values.view(torch.int64) + error).view(torch.float64)
            assert torch.equal(rotary._rounded(other, angles, is_sine=is_sine), wanted)


def test_neither_chunks_nor_threads_nor_the_start_change_a_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = make(5000)
    threads = torch.get_num_threads()
    monkeypatch.setattr(rotary, "CPU_CHUNK", 1 << 20)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(make(5000), wanted)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(rotary, "CPU_CHUNK", 24)
    assert torch.equal(make(700, start=4300), wanted[4300:])


def test_digits_do_not_depend_on_whole_turns() -> None:
    """Known values, and sin(2 x) = 2 sin(x) cos(x) for angles of millions of turns."""
    assert str(exact_sine(1.0)).startswith("0.84147098480789650665250232163029899962256306079837")
    assert str(exact_cosine(1.0)).startswith("0.54030230586813971740093660744297660373231042061792")
    with localcontext(prec=80):
        for angle in (0.0, 1.0, 3.140625, 131071.0, 2.0**28 - 1):
            doubled = exact_sine(2 * angle)
            sine, cosine = exact_sine(angle), exact_cosine(angle)
            assert abs(doubled - 2 * sine * cosine) < Decimal("1e-60")
            assert abs(sine**2 + cosine**2 - 1) < Decimal("1e-60")


_FORKS = """
import os, signal, torch
from llmctl.plugins.ops.rope_kv_write.table import fill_rotary_table
torch.set_num_threads(2)
frequencies = [0.5**i for i in range(64)]
made = [torch.empty(4096, 128) for _ in range(2)]
torch.ones(1 << 20, dtype=torch.float64).cos()  # starts the threads that a child does not have
fill_rotary_table(made[0], frequencies, 1.0)
child = os.fork()
if not child:
    signal.alarm(10)
    fill_rotary_table(made[1], frequencies, 1.0)
    os._exit(0 if made[0].numpy().tobytes() == made[1].numpy().tobytes() else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
"""


def test_a_forked_process_makes_its_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS], timeout=60, check=False)
    assert done.returncode == 0

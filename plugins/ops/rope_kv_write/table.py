"""The table of cosines and sines that RoPE looks up, from the inverse frequencies in a plan.

    angle = position * frequency, rounded to float32
    table[position] = factor * cos(angle) for each frequency, then factor * sin(angle)

Cosines and sines are correctly rounded to float32, whatever library and device computes them. Every
library's float64 values are right to a few units in the last place, so rounding them to float32 is
right wherever they are not that close to the middle between two float32 numbers. The few that are,
one in eight million, are computed with 80 digits. The rest is single multiplications, which IEEE
754 defines. So the bits are a function of the definition alone: the same on every CPU and GPU, for
every number of threads and every version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Literal

import numpy as np
import torch

# Angles computed at a time, each in float64: on a CPU as many as stay in a core's cache, and fewer
# than torch divides among threads; on a GPU so many that launches take little of the time.
CPU_CHUNK, DEVICE_CHUNK = 1 << 14, 1 << 18
_DIGITS = 80
_PI = Decimal("3.141592653589793238462643383279502884197169399375105820974944592307816406286209")
# Of a float64, the bits that a float32 does not have; the middle between two float32 numbers is
# where they are the first of these alone.
_DROPPED = 29
_MIDDLE = 1 << (_DROPPED - 1)
_DOUBT = 32  # units in the last place of float64; libraries are wrong by less than 4


def fill_rotary_table(
    table: torch.Tensor, frequencies: Sequence[float], factor: float, start: int = 0
) -> None:
    """Write positions from `start` on: float32 [positions, 2 * len(frequencies)], on any device; a
    row is a position's cosines, then its sines.

    Frequencies and the factor are float32 numbers, within the limits that plans are checked for.
    """
    half, device = len(frequencies), table.device
    each = torch.tensor(frequencies, dtype=torch.float32, device=device)
    step = max(1, (CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK) // half)
    for first in range(0, len(table), step):
        rows = table[first : first + step]
        positions = torch.arange(len(rows), device=device) + (start + first)
        angles = (positions.to(torch.float32)[:, None] * each).double()
        rows[:, :half] = _rounded(_values(angles, "cos"), angles, is_sine=False)
        rows[:, half:] = _rounded(_values(angles, "sin"), angles, is_sine=True)
        rows *= factor


def _values(angles: torch.Tensor, function: Literal["cos", "sin"]) -> torch.Tensor:
    """Of float64 angles. On a CPU numpy's: torch's are MKL's, on threads of OpenMP, which a forked
    process does not have and waits for without end."""
    if angles.device.type != "cpu":
        values: torch.Tensor = getattr(angles, function)()
        return values
    return torch.from_numpy(getattr(np, function)(angles.numpy()))


def _rounded(values: torch.Tensor, angles: torch.Tensor, *, is_sine: bool) -> torch.Tensor:
    """float32: the cosines or sines of angles, of which `values` are float64 approximations."""
    bits = values.view(torch.int64)
    doubtful = ((bits - (_MIDDLE - _DOUBT)) & (2 * _MIDDLE - 1)) <= 2 * _DOUBT
    rounded = values.float()
    places = doubtful.nonzero().tolist()
    for place in map(tuple, places):
        below = values[place].view(torch.int64) & -(1 << _DROPPED)  # towards zero
        middle = float((below | _MIDDLE).view(torch.float64))
        exact = exact_sine(float(angles[place])) if is_sine else exact_cosine(float(angles[place]))
        is_above = abs(exact) > abs(Decimal(middle))
        rounded[place] = (below + (is_above << _DROPPED)).view(torch.float64)
    return rounded


def exact_cosine(angle: float) -> Decimal:
    """To 60 digits after the point, for angles below 2**40."""
    return _series(angle, Decimal(1), 0)


def exact_sine(angle: float) -> Decimal:
    """To 60 digits after the point, for angles below 2**40."""
    return _series(angle, None, 1)


def _series(angle: float, first: Decimal | None, power: int) -> Decimal:
    """Taylor's, of the angle less whole turns: terms x**n / n! of alternating sign."""
    with localcontext(prec=_DIGITS):
        x = Decimal(angle) % (2 * _PI)
        term = x if first is None else first
        total, last = Decimal(0), Decimal(-1)
        while total != last:
            last = total
            total += term
            term *= -x * x / ((power + 1) * (power + 2))
            power += 2
        return total

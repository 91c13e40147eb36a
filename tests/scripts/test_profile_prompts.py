"""What a profile of prompts charges to kernels, and to none."""

from __future__ import annotations

import pytest

from scripts.profile.prompts import idle_us
from scripts.profile.rounds import Kernel, charge

# Programmatic launches start before the kernel before them has ended.
KERNELS: list[Kernel] = [("a", 10.0, 15.0), ("b", 14.0, 19.0), ("a", 22.0, 30.0), ("c", 21.0, 31.0)]


def test_a_kernel_is_charged_with_what_passes_between_two_ends() -> None:
    assert charge(KERNELS) == {"a": (5.0 + 11.0, 2), "b": (4.0, 1), "c": (1.0, 1)}
    assert sum(time for time, _ in charge(KERNELS).values()) == 31.0 - 10.0


def test_time_in_which_nothing_ran_is_known_whatever_the_order_of_ends() -> None:
    assert idle_us(KERNELS) == pytest.approx(21.0 - 19.0)
    assert idle_us(KERNELS[:2]) == 0.0

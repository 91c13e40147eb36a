"""What a profile of prompts charges to kernels, and to none."""

from __future__ import annotations

import pytest

from scripts.profile.prompts import idle_us, prompt_steps
from scripts.profile.rounds import Kernel, charge

# Programmatic launches start before the kernel before them has ended.
KERNELS: list[Kernel] = [("a", 10.0, 15.0), ("b", 14.0, 19.0), ("a", 22.0, 30.0), ("c", 21.0, 31.0)]


def test_a_kernel_is_charged_with_what_passes_between_two_ends() -> None:
    assert charge(KERNELS) == {"a": (5.0 + 11.0, 2), "b": (4.0, 1), "c": (1.0, 1)}
    assert sum(time for time, _ in charge(KERNELS).values()) == 31.0 - 10.0


def test_time_in_which_nothing_ran_is_known_whatever_the_order_of_ends() -> None:
    assert idle_us(KERNELS) == pytest.approx(21.0 - 19.0)
    assert idle_us(KERNELS[:2]) == 0.0


def test_a_prompts_steps_are_what_follows_the_last_round_until_its_token():
    names = ["embed", "batch", "accept", "embed", "chunk", "batch", "chunk", "argmax", "embed"]
    kernels = [(name, float(at), at + 1.0) for at, name in enumerate(names)]
    assert [name for name, *_ in prompt_steps(kernels)] == names[3:8]
    assert prompt_steps(kernels[3:7]) == kernels[3:7]
    with pytest.raises(SystemExit, match="longer than a round"):
        prompt_steps(kernels[:3])

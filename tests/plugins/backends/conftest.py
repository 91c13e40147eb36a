"""Operators that say what they were asked for, and the CPU library as it was."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from support.cpu_program import (
    VOCAB,
)
from support.cuda_program import launches

from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cuda import program as program_module


@pytest.fixture(autouse=True)
def cpu_settings() -> Iterator[None]:
    """Of the library, which all tests of a worker share: a test may change them."""
    threads = cpu.num_threads()
    yield
    cpu.set_num_threads(threads)
    cpu.set_instruction_set(cpu.instruction_sets()[0])


@pytest.fixture
def kernels(monkeypatch):
    """Operators whose launches say what they were asked for."""

    def load(op: str, part: str) -> ModuleType:
        module = ModuleType(f"{op}.{part}")
        module.launches = launches
        module.OWN_ROLES = frozenset({"weight", "x", "scale", "out"})
        return module

    monkeypatch.setattr(program_module, "operator_module", load)


@pytest.fixture
def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(0, VOCAB, n) for n in (1, 17, 70, 33, 64, 5)]

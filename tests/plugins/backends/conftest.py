"""Operators that say what they were asked for."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from support.cpu_program import (
    VOCAB,
)
from support.cuda_program import launches

from llmctl.plugins.backends.cuda import program as program_module


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

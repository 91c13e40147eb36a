"""Executors that tests make, shut down and checked at the end."""

from __future__ import annotations

import threading

import pytest
from support.executor import WAIT_S, config

from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor


@pytest.fixture
def make(fake):
    """Executors that are shut down, and whose cache is checked, at the end of the test."""
    made = []

    def make(target=None, drafter=None, runner=None, **rest) -> Executor:
        target = target or fake.Engine()
        made.append(Executor(target, drafter, config(**rest), ReferenceSampling(), runner))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
        executor._worker.kv_cache.check_invariants()


@pytest.fixture
def gated(fake):
    """An engine whose steps wait for `gate`; `running` is set when one waits."""

    class Gated(fake.Engine):
        def __init__(self, **size) -> None:
            super().__init__(**size)
            self.gate, self.running = threading.Event(), threading.Event()

        def run(self, step):
            self.running.set()
            assert self.gate.wait(WAIT_S)
            return super().run(step)

    return Gated

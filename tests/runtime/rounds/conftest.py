"""A device made of fakes, for tests of rounds."""

from __future__ import annotations

import pytest
from support.cuda_rounds import (
    DRAFT_LEN,
    Device,
    OnDevice,
)
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.backends.cuda.queue import DeviceQueue


@pytest.fixture
def make_engine(fake, monkeypatch):
    """A fake engine that also has what a runner asks of a CudaEngine."""

    run_rounds_by_reference(monkeypatch)

    class DeviceEngine(OnDevice, fake.Engine):
        def __init__(self, queue: DeviceQueue, **rest) -> None:
            super().__init__(max_draft_len=DRAFT_LEN, **rest)
            self.queue = queue

        def feed(self, step) -> None:
            assert not len(step.logit_rows)
            self.run(step)

    return DeviceEngine


@pytest.fixture(params=[True, False], ids=["draft", "plain"])
def device(request, make_engine) -> Device:
    return Device(make_engine, request.param)

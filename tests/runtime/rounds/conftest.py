"""A device made of fakes, for tests of rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda import run_rounds_by_reference
from support.cuda_rounds import (
    DRAFT_LEN,
    Device,
    Program,
)

from llmctl.plugins.backends.cuda.queue import DeviceQueue


@pytest.fixture
def make_engine(fake, monkeypatch):
    """A fake engine that also has what a runner asks of a CudaEngine."""

    run_rounds_by_reference(monkeypatch)

    class DeviceEngine(fake.Engine):
        def __init__(self, queue: DeviceQueue, **rest) -> None:
            super().__init__(max_draft_len=DRAFT_LEN, **rest)
            self.logits_after = super().logits
            self.queue = queue
            self.max_num_rows = self.max_batch_size * (DRAFT_LEN + 1)
            self.logits = torch.zeros(self.max_num_rows, self.vocab_size)
            self.program = Program(self)
            self.is_capturable = lambda: True

        def run(self, step) -> np.ndarray:
            logits, self.logits = self.logits, self.logits_after
            try:
                return super().run(step)
            finally:
                self.logits = logits

        def feed(self, step) -> None:
            assert not len(step.logit_rows)
            self.run(step)

        def prepare_prompts(self, max_num_tokens: int) -> None:
            pass

    return DeviceEngine


@pytest.fixture(params=[True, False], ids=["draft", "plain"])
def device(request, make_engine) -> Device:
    return Device(make_engine, request.param)

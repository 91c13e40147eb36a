"""A device that knows every token at once, for `profile_host.py`: what is left is the host's work.

It can be given times: then steps and rounds take that long, one after another, on a clock of their
own, and it records how long it was idle before each.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.device_loop.state import RECORD_COMMITTED, RECORD_EMITTED, RECORD_TOKENS
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.rounds.cuda_rounds import RING_SLOTS, CudaRoundRunner
from llmctl.runtime.rounds.device_steps import RoundShape
from llmctl.runtime.rounds.rounds import RoundReport

TOKEN = 77  # what it says after everything


class StubDevice:
    """Work that takes time and nothing else, in order."""

    def __init__(self, round_s: float = 0.0, step_s: float = 0.0) -> None:
        self.round_s, self.step_s = round_s, step_s
        self.free_at = 0.0
        self.idle_s = 0.0  # before the work enqueued last

    def enqueue(self, seconds: float) -> float:
        """When it will be done."""
        now = perf_counter()
        self.idle_s = max(0.0, now - self.free_at)
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at

    def wait(self, until: float) -> None:
        """As a synchronization does: without the interpreter's lock."""
        left = until - perf_counter()
        if left > 0:
            sleep(left)


class StubTarget:
    """A step runner of an 8B model's limits whose logits say TOKEN."""

    vocab_size, max_seq_len = 128_256, 10240
    max_num_tokens, max_draft_len, tokens_per_block = 8448, 0, 32
    is_asynchronous, onboards_aside, has_rounds = True, False, True
    takes_trees, context_group, shares_logits = False, 0, False

    def __init__(self, batch: int, device: StubDevice) -> None:
        self.max_batch_size = self.max_num_rows = batch
        self.queue = DeviceQueue("cpu")
        self.logits = torch.empty(0)
        blocks = self.max_seq_len // self.tokens_per_block
        limits = StepLimits(
            max_num_tokens=self.max_num_tokens,
            max_num_rows=batch,
            max_batch_size=batch,
            max_seq_len=self.max_seq_len,
            max_draft_len=0,
            tokens_per_block=self.tokens_per_block,
            kv_dtype="float8_e4m3fn",
        )
        tables = torch.zeros((batch, blocks), dtype=torch.int32)
        self.program = SimpleNamespace(limits=limits, step=SimpleNamespace(block_tables=tables))
        self._device = device

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

    def copy_blocks(self, copies: Items[object]) -> None:
        """Nothing to copy."""

    def is_capturable(self) -> bool:
        """Everything is."""
        return True

    def run(self, step: Any) -> StubLogits:
        """Logits that know when they are there."""
        device = self._device
        return StubLogits(len(step.logit_rows), device.enqueue(device.step_s), device)


class StubLogits:
    """So many rows, readable from a moment on."""

    def __init__(self, count: int, done: float, device: StubDevice) -> None:
        self._count, self.done, self.device = count, done, device

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: slice) -> StubLogits:
        return self


class StubSampling:
    """TOKEN for every row."""

    def argmax(self, logits: StubLogits) -> np.ndarray:
        """The copy to the host, which waits, and what it brings."""
        self.to_host(logits)
        return np.full(len(logits), TOKEN, np.int32)

    def to_host(self, logits: StubLogits) -> None:
        """Waits for them."""
        logits.device.wait(logits.done)


class StubRunner(CudaRoundRunner):
    """The CUDA backend's rounds with arrays of its own; a graph writes a record."""

    def __init__(self, target: Any, device: StubDevice) -> None:
        super().__init__(target, NoDeviceDrafter(), lambda record: SimpleNamespace(replay=record))
        self._device = device
        self._done: dict[int, float] = {}
        self._verify = self._write_record

    def _write_record(self, shape: RoundShape) -> None:
        count, slot = self._num_requests, self._num_started % RING_SLOTS
        committed = self._state.committed[:count].numpy()
        record = self._ring[slot, :count]
        record[:, RECORD_COMMITTED] = committed
        record[:, RECORD_EMITTED] = 1
        record[:, RECORD_TOKENS] = TOKEN
        committed += 1
        self._done[slot] = self._device.enqueue(self._device.round_s)

    def collect(self) -> RoundReport:
        """With the time that the device has for a round."""
        return replace(super().collect(), draft_s=0.0, verify_s=self._device.round_s)

    def wait_for_oldest(self) -> None:
        """As the events of a GPU are waited for."""
        self._device.wait(self._done[self._in_flight[0].slot])

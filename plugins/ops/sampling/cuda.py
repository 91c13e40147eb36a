"""The CUDA backend's sampling: rows are drawn where they lie, and one small copy brings the tokens.

Which code draws a row is decided by the row alone, so a request's token is the same with and
without drafts and beside any others: rows with bans or penalties, and whatever needs whole
distributions, are drawn on the host from a copy of their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceLogits, DeviceQueue, device_errors
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.sampling import kernel
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingArrays, SamplingScratch
from llmctl.plugins.ops.sampling.spec import MAX_TOP_K, TARGET_STREAM, SamplingRow, has_penalties

MAX_ROWS = 64  # rows drawn together; scratch grows with them
ALIGNMENT = 16  # bytes, of every pointer argument


def draws_on_device(row: SamplingRow) -> bool:
    """True when the kernels can draw the row.

    Drafts whose distribution is kept (another stream) are drawn by the code that computes the
    distribution, so that no id is drawn which that gives no mass.
    """
    return not row.banned and not has_penalties(row.params) and row.stream == TARGET_STREAM


def scratch_bytes(rows: int, vocab_size: int) -> int:
    """Device memory that drawing from `rows` rows of `vocab_size` ids takes."""
    scratch = SamplingScratch.allocate(rows, vocab_size, "meta")
    return sum(getattr(scratch, name).nbytes for name in scratch.__slots__)


class CudaSampling:
    """A `SamplingBackend` for `DeviceLogits`. One object serves target and draft.

    launch(launches) enqueues kernels on the queue's stream.
    """

    def __init__(self, queue: DeviceQueue, launch: Callable[[Sequence[Launch]], None]) -> None:
        self._queue = queue
        self._launch = launch
        self._host = CpuSampling()
        self._scratch: dict[int, SamplingScratch] = {}  # by vocabulary
        with queue.scope():
            self._tokens = torch.zeros(MAX_ROWS, dtype=torch.int32, device=queue.device)  # grows

    def argmax(self, logits: DeviceLogits) -> NDArray[np.int32]:
        """The best id of each row; the lowest id on ties, -1 for a row with NaN."""
        return self._in_groups(
            logits,
            lambda tensor, out, scratch, first: [kernel.argmax(tensor, out, scratch, len(tensor))],
        )

    def sample_rows(self, logits: DeviceLogits, rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
        """One token per row."""
        assert len(logits) == len(rows)
        here = [index for index, row in enumerate(rows) if draws_on_device(row)]
        if len(here) == len(rows):
            return self._draw(logits, rows).astype(np.int64)
        there = sorted(set(range(len(rows))) - set(here))
        tokens = np.empty(len(rows), np.int64)
        if here:
            tokens[here] = self._draw(logits[here], [rows[index] for index in here])
        picked = [rows[index] for index in there]
        tokens[there] = self._host.sample_rows(logits[there].numpy(), picked)
        return tokens

    def processed_probs(
        self, logits: DeviceLogits, rows: Sequence[SamplingRow]
    ) -> NDArray[np.float64]:
        """The distribution [rows, vocab] that each row is drawn from."""
        return self._host.processed_probs(logits.numpy(), rows)

    def draw_from_probs(self, probs: NDArray[np.float64], row: SamplingRow) -> int:
        """Sample from a distribution [vocab] with the row's keyed noise."""
        return self._host.draw_from_probs(probs, row)

    def uniforms(self, rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
        """One uniform in (0, 1) per row, keyed by its (seed, position, stream)."""
        return self._host.uniforms(rows)

    def top_log_probs(
        self, logits: DeviceLogits, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ids of the largest logits of each row, and their log-probabilities."""
        with device_errors("choosing among logits"), self._queue.scope():
            ids, log_probs = top_log_probs(logits.tensor, count)
        return self._queue.to_host(ids).numpy(), self._queue.to_host(log_probs).numpy()

    def log_softmax_at(self, logits: DeviceLogits, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[i]) under the raw row i."""
        return self._host.log_softmax_at(logits.numpy(), tokens)

    def _draw(self, logits: DeviceLogits, rows: Sequence[SamplingRow]) -> NDArray[np.int32]:
        arrays, positions = _upload(rows, self._queue)
        has_wide = any(kernel.is_wide(row.params, logits.shape[1]) for row in rows)

        def launches(
            tensor: torch.Tensor, out: torch.Tensor, scratch: SamplingScratch, first: int
        ) -> Sequence[Launch]:
            end = first + len(tensor)
            part = SamplingArrays(
                **{name: getattr(arrays, name)[first:end] for name in arrays.__slots__}
            )
            drawn = DrawnRows(len(tensor), part, positions[first:end])
            return kernel.sample(tensor, out, scratch, drawn, has_wide=has_wide)

        return self._in_groups(logits, launches)

    def _in_groups(
        self,
        logits: DeviceLogits,
        launches: Callable[[torch.Tensor, torch.Tensor, SamplingScratch, int], Sequence[Launch]],
    ) -> NDArray[np.int32]:
        """Tokens of all rows, MAX_ROWS at a time; the host waits once."""
        scratch, count = self._scratch_for(logits.shape[1]), len(logits)
        if count > len(self._tokens):
            with self._queue.scope():
                self._tokens = torch.zeros(count, dtype=torch.int32, device=self._queue.device)
        for first in range(0, count, MAX_ROWS):
            rows = self._aligned(logits.tensor[first : first + MAX_ROWS])
            self._launch(launches(rows, self._tokens[first:count], scratch, first))
        found: NDArray[np.int32] = self._queue.to_host(self._tokens[:count]).numpy()
        return found

    def _aligned(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows where kernels may read them: they take every pointer to be 16-byte aligned."""
        if rows.data_ptr() % ALIGNMENT == 0:
            return rows
        with device_errors("aligning rows of logits"), self._queue.scope():
            return rows.clone()

    def _scratch_for(self, vocab_size: int) -> SamplingScratch:
        scratch = self._scratch.get(vocab_size)
        if scratch is None:
            with self._queue.scope():
                scratch = SamplingScratch.allocate(MAX_ROWS, vocab_size, self._queue.device)
            self._scratch[vocab_size] = scratch
        return scratch


def _upload(rows: Sequence[SamplingRow], queue: DeviceQueue) -> tuple[SamplingArrays, torch.Tensor]:
    """(how each row draws, the position of each token), on the device, by two copies."""
    params = [row.params for row in rows]
    reals = np.array(
        [
            [item.temperature or 1.0 for item in params],  # greedy rows do not read it
            [1.0 if item.top_p is None else item.top_p for item in params],
            [item.min_p for item in params],
        ]
    )
    words = np.array([row.seed for row in rows], np.uint64)
    low, high = (words & np.uint64(0xFFFFFFFF)), words >> np.uint64(32)
    integers = np.stack(
        [
            np.array([min(item.top_k or 0, MAX_TOP_K) for item in params], np.int32),
            low.astype(np.uint32).view(np.int32),
            high.astype(np.uint32).view(np.int32),
            np.array([row.stream for row in rows], np.int32),
            np.array([item.is_greedy for item in params], np.int32),
            np.array([row.position for row in rows], np.int32),
        ]
    )
    temperature, top_p, min_p = queue.to_device(_padded(reals))
    top_k, seed_low, seed_high, stream, greedy, positions = queue.to_device(_padded(integers))
    arrays = SamplingArrays(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed_low=seed_low,
        seed_high=seed_high,
        stream=stream,
        greedy=greedy,
    )
    return arrays, positions


def _padded(table: NDArray[Any]) -> torch.Tensor:
    """The rows of a table, each on an aligned address."""
    count = table.shape[1]
    return torch.from_numpy(np.pad(table, ((0, 0), (0, -count % ALIGNMENT))))

"""The device side of a run, as seen by its host: one stream, and logits that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.errors import DeviceFailure, LlmctlError, OutOfMemory


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class HostEvent:
    """The event of a queue on the cpu."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def record(self) -> None:
        """Here and now."""
        self.time_s = perf_counter()

    def synchronize(self) -> None:
        """Everything recorded is done."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to another."""
        return 1e3 * (end_event.time_s - self.time_s)


class DeviceQueue:
    """A device and the one stream that all work of a run uses, for target and draft alike.

    On "cpu" everything is done immediately; tests of the host's part use that without a GPU.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """on_wait: called after each waiting for the device, to raise what its work may have met;
        None: nothing."""
        self.check = on_wait or _nothing  # what else waited for the device calls it, too
        self.device = torch.device(device)
        is_cuda = self.device.type == "cuda"
        self.stream = new_stream(self.device) if is_cuda else None

    @property
    def handle(self) -> int:
        """The stream as the driver knows it; 0 on a cpu."""
        return 0 if self.stream is None else int(self.stream.cuda_stream)

    def scope(self) -> AbstractContextManager[object]:
        """Inside, torch's operations go to the stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def make_event(self) -> Event:
        """A mark to record within `scope`, to wait for and to take times between."""
        return HostEvent() if self.stream is None else new_event(enable_timing=True)

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""
        if self.stream is not None:
            with device_errors("waiting for the device"):
                self.stream.synchronize()
            self.check()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in (pinned) host memory, after everything enqueued before."""
        if self.stream is None:
            return tensor.clone()
        with device_errors("reading results"), self.scope():
            # torch keeps freed pinned memory for the next such copy.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self.stream.synchronize()
        self.check()
        return host

    def to_device(self, array: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, in the stream's order."""
        if self.stream is None:
            return array.clone()
        with device_errors("writing inputs"), self.scope():
            return array.pin_memory().to(self.device, non_blocking=True)


class DeviceLogits:
    """Logits [rows, vocab] float32 in device memory, valid until the engine's next step.

    Rows can be counted, sliced and selected by a list; `numpy` copies them to the host.
    """

    __slots__ = ("queue", "tensor")

    def __init__(self, tensor: torch.Tensor, queue: DeviceQueue) -> None:
        self.tensor = tensor
        self.queue = queue

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, vocab)."""
        rows, vocab = self.tensor.shape
        return rows, vocab

    def __len__(self) -> int:
        return self.tensor.shape[0]

    @overload
    def __getitem__(self, rows: slice) -> DeviceLogits: ...
    @overload
    def __getitem__(self, rows: Sequence[int]) -> DeviceLogits: ...
    def __getitem__(self, rows: slice | Sequence[int]) -> DeviceLogits:
        if isinstance(rows, slice):
            return DeviceLogits(self.tensor[rows], self.queue)
        index = self.queue.to_device(torch.tensor(list(rows), dtype=torch.int64))
        with device_errors("picking rows of logits"), self.queue.scope():
            return DeviceLogits(self.tensor.index_select(0, index), self.queue)

    def columns(self, count: int) -> DeviceLogits:
        """The first `count` ids of every row, as a copy."""
        with device_errors("picking columns of logits"), self.queue.scope():
            return DeviceLogits(self.tensor[:, :count].contiguous(), self.queue)

    def numpy(self) -> NDArray[np.float32]:
        """A copy on the host."""
        found: NDArray[np.float32] = self.queue.to_host(self.tensor).numpy()
        return found


def new_stream(device: torch.device, *, is_urgent: bool = False) -> torch.cuda.Stream:
    """A stream that no other waits for; kernels of an urgent one start before waiting kernels of
    others."""
    priority = -1 if is_urgent else 0
    return torch.cuda.Stream(device, priority)


def new_event(*, enable_timing: bool = False) -> torch.cuda.Event:
    """A mark to record on a stream and to wait for."""
    return torch.cuda.Event(enable_timing=enable_timing)


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turns torch's errors of a device into DeviceFailure and OutOfMemory."""
    try:
        yield
    except LlmctlError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{doing}: the device has no memory left ({_first_line(error)})",
            fix="lower --kv-cache-free-gpu-memory-fraction",
        ) from error
    except RuntimeError as error:  # torch's AcceleratorError is one
        raise DeviceFailure(
            f"{doing}: {_first_line(error)}",
            fix="start again; after a failed kernel a process can use the device no more",
        ) from error


def _nothing() -> None:
    pass


def _first_line(error: Exception) -> str:
    lines: list[Any] = str(error).splitlines() or [type(error).__name__]
    return str(lines[0])

"""Streams of a device, as seen by code that orders work between them.

Work on one stream runs in order; between streams only `wait` makes an order. On a CPU everything
runs immediately, which is one of the allowed orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from llmctl.plugins.backends.cuda.queue import DeviceQueue, new_event, new_stream


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """True once all work before it is done. Does not wait."""


class Stream(Protocol):
    """Its work runs in order, concurrently with other streams."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` does to tensors of the device."""

    def mark(self) -> Mark:
        """A mark after all work so far."""

    def wait(self, mark: Mark) -> None:
        """Make later work wait for a mark of another stream."""


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """See Stream, as for all that follow."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = new_event()
        event.record(self._stream)
        return event

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)


class _Done:
    """The mark of what ran at once."""

    def query(self) -> bool:
        return True


class HostStream:
    """A CPU: work is done when `run` returns."""

    def run(self, work: Callable[[], None]) -> None:
        """See Stream, as for all that follow."""
        work()

    def mark(self) -> Mark:
        return _Done()

    def wait(self, mark: Mark) -> None:
        assert mark.query()


def main_stream(queue: DeviceQueue) -> Stream:
    """The stream of the engines' steps."""
    return HostStream() if queue.stream is None else CudaStream(queue.stream)


def side_stream(queue: DeviceQueue) -> Stream:
    """A new stream. Its kernels are short, and start as soon as any multiprocessor has room;
    otherwise they would wait until a step leaves some idle."""
    if queue.stream is None:
        return HostStream()
    return CudaStream(new_stream(queue.device, is_urgent=True))

"""KV blocks in host memory for an engine on a GPU, and the stream that moves them.

The host waits for nothing: copies go to a stream of their own, behind all work enqueued so far, and
what is enqueued next waits for them on the device. A block's layers lie apart in the cache and
together in host memory, so a kernel gathers them into a buffer that one transfer moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.cuda.queue import DeviceQueue, device_errors, new_stream
from llmctl.runtime.kv_cache import BlockCopy, CopyKind


class HostBlocks:
    """`num_blocks` places for blocks of `num_layers` times `layer_bytes` bytes, in pinned memory.

    Raises OutOfMemory.
    """

    def __init__(
        self, queue: DeviceQueue, num_blocks: int, num_layers: int, layer_bytes: int
    ) -> None:
        self.num_blocks = num_blocks
        self._queue = queue
        self._stream = None if queue.stream is None else new_stream(queue.device)
        num_bytes = num_blocks * num_layers * layer_bytes
        try:
            self._slots = torch.empty((num_blocks, num_layers, layer_bytes), dtype=torch.uint8)
            with device_errors("pinning host memory"), queue.scope():
                self._pin(num_bytes)
                self._buffer = torch.empty(
                    (num_layers, layer_bytes), dtype=torch.uint8, device=queue.device
                )
        except (OutOfMemory, DeviceFailure, RuntimeError) as error:
            raise OutOfMemory(
                f"a host tier of {num_blocks} KV blocks needs {num_bytes / 1e9:.2f} GB of pinned "
                "host memory, which is not there",
                fix="lower --kv-cache-host-memory-bytes",
            ) from error

    def copy(self, cache: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        """Perform copies in order; cache is uint8 [num_layers, blocks, layer_bytes]."""
        with device_errors("moving KV blocks"), self._beside():
            for source, destination, _, kind in copies:
                if kind is CopyKind.WITHIN:
                    cache[:, destination].copy_(cache[:, source])
                elif kind is CopyKind.OFFLOAD:
                    self._buffer.copy_(cache[:, source])
                    self._slots[destination].copy_(self._buffer, non_blocking=True)
                else:
                    self._buffer.copy_(self._slots[source], non_blocking=True)
                    cache[:, destination].copy_(self._buffer)

    def _pin(self, num_bytes: int) -> None:
        """Let the device copy from and to the slots without help. torch's own pinned memory comes
        in powers of two, so the pages are registered where they are."""
        if self._stream is None:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not type it
        address = self._slots.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream for copies: after what is enqueued, and before what will be."""
        main = self._queue.stream
        if main is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            main.wait_stream(self._stream)

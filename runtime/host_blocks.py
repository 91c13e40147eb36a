"""KV blocks in host memory for an engine on a GPU, moved beside the steps.

Nobody waits for the link between host and device but who must, and who waits is the device:

    main   | gather an evicted block | step, which overwrites it | step | ...
    out                              | transfer to host memory |
    in       | give up a block, bring another into its place | bring | bring | ...

- What a step is about to overwrite is gathered into a buffer by the main stream and leaves from
  there. Only when every buffer still waits for its transfer does the main stream wait for one.
- What comes back does so on a stream of its own, behind all work enqueued so far: the block that it
  comes into may still be in use. So does what leaves to make room for it.
- A place in host memory is read or written by one transfer after the other, and so is a block that
  a stream beside the main one works on.

A block's layers lie apart in the cache and together in host memory, so each goes through a buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

import torch

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.cuda.queue import DeviceQueue, device_errors
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind
from llmctl.runtime.lanes import Lane, Mark, main_lane, side_lane
from llmctl.runtime.memory_usage import PinnedMemory

NUM_BUFFERS = 8  # blocks that may wait for their transfer before a step does


class HostBlocks:
    """`num_blocks` places for blocks of `num_layers` times `layer_bytes` bytes, in pinned memory.

    `lanes` are the main one, the one out and the one in; those of `queue` where not given. Raises
    OutOfMemory.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        num_blocks: int,
        num_layers: int,
        layer_bytes: int,
        lanes: tuple[Lane, Lane, Lane] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._main, self._out, self._in = lanes or (
            main_lane(queue),
            side_lane(queue),
            side_lane(queue),
        )
        num_bytes = num_blocks * num_layers * layer_bytes
        shape = (num_layers, layer_bytes)
        try:
            self._slots = torch.empty((num_blocks, *shape), dtype=torch.uint8)
            with device_errors("pinning host memory"), queue.scope():
                if queue.stream is not None:
                    self._pin(num_bytes)
                self._buffers = torch.empty(
                    (NUM_BUFFERS + 1, *shape), dtype=torch.uint8, device=queue.device
                )
            queue.synchronize()  # the memory may have been another's, whose work is not done
        except (OutOfMemory, DeviceFailure, RuntimeError) as error:
            raise OutOfMemory(
                f"a host tier of {num_blocks} KV blocks needs {num_bytes / 1e9:.2f} GB of pinned "
                "host memory, which is not there",
                fix="lower --kv-cache-host-memory-bytes",
            ) from error
        self._sent: list[Mark | None] = [None] * NUM_BUFFERS  # the last transfer from each buffer
        self._next_buffer = 0
        self._slot_marks: dict[int, Mark] = {}  # the last transfer from or to each place
        self._block_marks: dict[int, Mark] = {}  # the last work of the lane in on each block

    def copy(self, cache: torch.Tensor, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order; cache is uint8 [num_layers, blocks, layer_bytes]. What is not
        there yet for steps enqueued from now on; None where all is."""
        self._forget_what_is_done()
        refilled = {copy.dst_block for copy in copies if copy.kind is CopyKind.ONBOARD}

        def is_aside(copy: BlockCopy) -> bool:
            if copy.kind is CopyKind.OFFLOAD:
                return copy.src_block in refilled
            return copy.kind is CopyKind.ONBOARD

        with device_errors("moving KV blocks"):
            try:
                for aside, run in groupby(copies, is_aside):
                    if aside:
                        self._move_aside(cache, list(run))
                    else:
                        self._move_at_once(cache, run)
                return _Arrival(self._main, self._in.mark()) if refilled else None
            except BaseException:
                self._main.wait(self._in.mark())  # nobody will be told of what was started
                raise

    def settle(self) -> None:
        """Let whatever the device is given from now on wait for everything under way."""
        with device_errors("moving KV blocks"):
            for lane in (self._in, self._out):
                self._main.wait(lane.mark())

    def _move_aside(self, cache: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        """Bring blocks in, and out what was in their places."""
        slots, buffer = self._slots, self._buffers[NUM_BUFFERS]
        places, blocks = [], []
        for source, destination, _, kind in copies:
            is_in = kind is CopyKind.ONBOARD
            places.append(source if is_in else destination)
            blocks.append(destination if is_in else source)
        self._in.wait(self._main.mark())
        for mark in {self._slot_marks[slot] for slot in places if slot in self._slot_marks}:
            self._in.wait(mark)

        def work() -> None:
            for source, destination, _, kind in copies:
                if kind is CopyKind.ONBOARD:
                    buffer.copy_(slots[source], non_blocking=True)
                    cache[:, destination].copy_(buffer)
                else:
                    buffer.copy_(cache[:, source])
                    slots[destination].copy_(buffer, non_blocking=True)

        self._in.run(work)
        mark = self._in.mark()
        self._slot_marks |= dict.fromkeys(places, mark)
        self._block_marks |= dict.fromkeys(blocks, mark)

    def _move_at_once(self, cache: torch.Tensor, copies: Iterable[BlockCopy]) -> None:
        """Copies that the next step relies on, or whose blocks it overwrites."""
        for copy in copies:
            source, destination, _, kind = copy
            for block in (source, destination) if kind is CopyKind.WITHIN else (source,):
                if block in self._block_marks:
                    self._main.wait(self._block_marks[block])
            if kind is CopyKind.WITHIN:
                self._main.run(partial(_copy, cache[:, destination], cache[:, source]))
            else:
                self._send(cache[:, source], destination)

    def _send(self, block: torch.Tensor, slot: int) -> None:
        """Gather a block on the main lane, and let it leave beside."""
        index = self._next_buffer
        self._next_buffer = (index + 1) % NUM_BUFFERS
        buffer, place, sent = self._buffers[index], self._slots[slot], self._sent[index]
        if sent is not None:
            self._main.wait(sent)
        self._main.run(partial(_copy, buffer, block))
        self._out.wait(self._main.mark())
        if slot in self._slot_marks:
            self._out.wait(self._slot_marks[slot])
        self._out.run(partial(_copy, place, buffer))
        self._sent[index] = self._slot_marks[slot] = self._out.mark()

    def _forget_what_is_done(self) -> None:
        for marks in (self._slot_marks, self._block_marks):
            done = {mark for mark in set(marks.values()) if mark.query()}
            for key in [key for key, mark in marks.items() if mark in done]:
                del marks[key]

    def _pin(self, num_bytes: int) -> None:
        """Let the device copy from and to the slots without help. torch's own pinned memory comes
        in powers of two, so the pages are registered where they are."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not type it
        address = self._slots.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        PinnedMemory.num_bytes += num_bytes
        weakref.finalize(self, _unpin, address, num_bytes).atexit = False


class _Arrival:
    """What the lane in was given up to now."""

    def __init__(self, main: Lane, mark: Mark) -> None:
        self._main = main
        self._mark = mark

    def is_done(self) -> bool:
        """See Arrival."""
        with device_errors("bringing KV blocks from host memory"):
            return self._mark.query()

    def hold(self) -> None:
        """See Arrival."""
        with device_errors("bringing KV blocks from host memory"):
            self._main.wait(self._mark)


def _unpin(address: int, num_bytes: int) -> None:
    """Give pages back that no transfer uses any more."""
    PinnedMemory.num_bytes -= num_bytes
    with suppress(RuntimeError):  # a device that failed uses nothing
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # as above


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)

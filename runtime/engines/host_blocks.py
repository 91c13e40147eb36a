"""KV blocks in host memory for an engine on a GPU, copied while steps run.

Only work that needs a copy waits for the link between host and device, and it waits on the device:

    main   | gather an evicted block | step, which overwrites it | step | ...
    out                              | transfer to host memory |
    in       | give up a block, bring another into its place | bring | bring | ...

- What a step is about to overwrite is gathered into a buffer by the main stream and transferred
  from there. Only if every buffer still waits for its transfer does the main stream wait for one.
- Blocks are copied back on a separate stream, after all work enqueued so far, because the target
  block may still be in use. The same holds for blocks that leave to make room.
- Transfers that read or write the same slot in host memory run one after another, and so does work
  of the other streams on the same block.
- The host gives the stream at most MOST_AT_ONCE blocks per step, which takes it about 1 ms.

A block's layers are separate in the cache and contiguous in host memory, so each goes through a
buffer.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

import torch

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.runtime.engines.streams import Mark, Stream, main_stream, side_stream
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind
from llmctl.runtime.stats.process_memory import PinnedMemory

NUM_BUFFERS = 8  # blocks that may wait for their transfer before a step does
GROUP = 4  # blocks moved together: kernels, then transfers, so that the link seldom waits
BLOCKS_ON_DEVICE = NUM_BUFFERS + GROUP  # room that a host tier takes there
MOST_AT_ONCE = 64  # blocks; at 18 us of host each, and 3 ms of the link for those of an 8B model


class HostBlocks:
    """`num_blocks` places for blocks of `num_layers` times `layer_bytes` bytes, in pinned memory.

    `streams` are the main one, the one out and the one in; those of `queue` where not given. Raises
    OutOfMemory.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        num_blocks: int,
        num_layers: int,
        layer_bytes: int,
        streams: tuple[Stream, Stream, Stream] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._main, self._out, self._in = streams or (
            main_stream(queue),
            side_stream(queue),
            side_stream(queue),
        )
        num_bytes = num_blocks * num_layers * layer_bytes
        shape = (num_layers, layer_bytes)
        try:
            self._slots = torch.empty((num_blocks, *shape), dtype=torch.uint8)
            with device_errors("pinning host memory"), queue.scope():
                if queue.stream is not None:
                    self._pin(num_bytes)
                self._buffers = torch.empty(
                    (BLOCKS_ON_DEVICE, *shape), dtype=torch.uint8, device=queue.device
                )
            queue.synchronize()  # the memory may have been another's, whose work is not done
        except (OutOfMemory, DeviceFailure, RuntimeError) as error:
            raise OutOfMemory(
                f"a host tier of {num_blocks} KV blocks needs {num_bytes / 1e9:.2f} GB of pinned "
                "host memory, which is not there",
                fix="lower --kv-cache-host-memory-bytes",
            ) from error
        self._next_buffer = 0
        self._sent: dict[int, Mark] = {}  # the last transfer from each buffer
        self._waiting: deque[tuple[torch.Tensor, list[BlockCopy]]] = (
            deque()
        )  # for the inward stream
        self._num_given = 0  # groups for the inward stream, ever
        self._slot_marks: dict[int, Mark] = {}  # the last transfer from or to each place
        self._block_marks: dict[int, Mark] = {}  # the last work of the inward stream on each block

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
                    for group in _groups(run):
                        if aside:
                            self._move_aside(cache, group)
                        else:
                            self._move_at_once(cache, group)
                if not refilled:
                    return None
                self.advance()
                return _Arrival(self, self._num_given)
            except BaseException:
                self._waiting.clear()  # no caller will be told about started copies
                self._main.wait(self._in.mark())
                raise

    def advance(self, most: float = MOST_AT_ONCE) -> None:
        """Hand the inward stream up to `most` blocks of what waits for it."""
        if self._waiting:
            self._in.wait(self._main.mark())
        while self._waiting and most > 0:
            cache, group = self._waiting.popleft()
            slots, blocks = _ends(group)
            _wait_for(self._in, self._slot_marks, slots)
            self._in.run(partial(self._exchange, cache, group))
            mark = self._in.mark()
            self._slot_marks |= dict.fromkeys(slots, mark)
            self._block_marks |= dict.fromkeys(blocks, mark)
            most -= len(group)

    def mark_of(self, number: int) -> Mark | None:
        """A mark behind the first `number` groups for the inward stream; None while some wait."""
        return self._in.mark() if self._num_given - len(self._waiting) >= number else None

    def hold(self) -> None:
        """Make all later work on the device wait for all copies to the device."""
        with device_errors("moving KV blocks"):
            self.advance(math.inf)
            self._main.wait(self._in.mark())

    def settle(self) -> None:
        """The same for copies from the device, too."""
        self.hold()
        with device_errors("moving KV blocks"):
            self._main.wait(self._out.mark())

    def _move_aside(self, cache: torch.Tensor, group: list[BlockCopy]) -> None:
        """Copy blocks to the device, and first what was in their places, in the order of the
        queue."""
        self._waiting.append((cache, group))
        self._num_given += 1

    def _exchange(self, cache: torch.Tensor, group: Sequence[BlockCopy]) -> None:
        """All copies from the device, then all copies to it: kernels and transfers grouped by
        kind."""
        buffers, slots = list(self._buffers[NUM_BUFFERS:]), self._slots
        leaving = [copy for copy in group if copy.kind is CopyKind.OFFLOAD]
        coming = [copy for copy in group if copy.kind is CopyKind.ONBOARD]
        _copy_each(buffers, [cache[:, copy.src_block] for copy in leaving])
        _copy_each([slots[copy.dst_block] for copy in leaving], buffers)
        _copy_each(buffers, [slots[copy.src_block] for copy in coming])
        _copy_each([cache[:, copy.dst_block] for copy in coming], buffers)

    def _move_at_once(self, cache: torch.Tensor, group: Sequence[BlockCopy]) -> None:
        """Copies that the next step relies on, or whose blocks it overwrites."""
        source, destination = group[0].src_block, group[0].dst_block
        is_within = group[0].kind is CopyKind.WITHIN
        slots, blocks = ([], [source, destination]) if is_within else _ends(group)
        for _, others in self._waiting:
            other_slots, other_blocks = _ends(others)
            if not (set(slots).isdisjoint(other_slots) and set(blocks).isdisjoint(other_blocks)):
                self.advance(math.inf)  # what waits comes first
                break
        _wait_for(self._main, self._block_marks, blocks)
        if is_within:
            self._main.run(partial(_copy, cache[:, destination], cache[:, source]))
        else:
            self._send(cache, group)

    def _send(self, cache: torch.Tensor, group: Sequence[BlockCopy]) -> None:
        """Gather blocks on the main stream, and transfer them on the outward stream."""
        indices = [(self._next_buffer + i) % NUM_BUFFERS for i in range(len(group))]
        self._next_buffer = (indices[-1] + 1) % NUM_BUFFERS
        slots, blocks = _ends(group)
        buffers = [self._buffers[index] for index in indices]
        _wait_for(self._main, self._sent, indices)
        self._main.run(partial(_copy_each, buffers, [cache[:, block] for block in blocks]))
        self._out.wait(self._main.mark())
        _wait_for(self._out, self._slot_marks, slots)
        self._out.run(partial(_copy_each, [self._slots[slot] for slot in slots], buffers))
        mark = self._out.mark()
        self._sent |= dict.fromkeys(indices, mark)
        self._slot_marks |= dict.fromkeys(slots, mark)

    def _forget_what_is_done(self) -> None:
        for marks in (self._slot_marks, self._block_marks, self._sent):
            done = {mark for mark in set(marks.values()) if mark.query()}
            for key in [key for key, mark in marks.items() if mark in done]:
                del marks[key]

    def _pin(self, num_bytes: int) -> None:
        """Let the device copy from and to the slots without help. torch's own pinned memory comes
        in powers of two, so the pages are registered where they are."""
        runtime = torch.cuda.cudart()
        address = self._slots.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        PinnedMemory.num_bytes += num_bytes
        weakref.finalize(self, _unpin, address, num_bytes).atexit = False


class _Arrival:
    """The first `number` groups that the inward stream was given."""

    def __init__(self, host: HostBlocks, number: int) -> None:
        self._host = host
        self._number = number
        self._mark = host.mark_of(number)

    def is_done(self) -> bool:
        """See Arrival. Each time the inward stream is handed some more."""
        with device_errors("bringing KV blocks from host memory"):
            self._host.advance()
            if self._mark is None:
                self._mark = self._host.mark_of(self._number)
            return self._mark is not None and self._mark.query()

    def hold(self) -> None:
        """See Arrival."""
        self._host.hold()


def _unpin(address: int, num_bytes: int) -> None:
    """Give pages back that no transfer uses any more."""
    PinnedMemory.num_bytes -= num_bytes
    with suppress(RuntimeError):  # a device that failed uses nothing
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def _groups(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Runs of copies between device and host for which all that leaves may go before all that
    comes, up to GROUP either way; copies within the device alone."""
    group: list[BlockCopy] = []
    for copy in copies:
        number = sum(other.kind is copy.kind for other in group)
        is_kept = group and group[0].kind is not CopyKind.WITHIN is not copy.kind
        if not is_kept or number == GROUP or any(_must_follow(copy, other) for other in group):
            if group:
                yield group
            group = []
        group.append(copy)
    if group:
        yield group


def _must_follow(copy: BlockCopy, other: BlockCopy) -> bool:
    """True for what leaves from or to where `other`, before it, has to have come."""
    if copy.kind is not CopyKind.OFFLOAD or other.kind is not CopyKind.ONBOARD:
        return False
    return copy.src_block == other.dst_block or copy.dst_block == other.src_block


def _ends(group: Iterable[BlockCopy]) -> tuple[list[int], list[int]]:
    """The places in host memory and the blocks of the device that copies between them touch."""
    slots, blocks = [], []
    for source, destination, _, kind, _ in group:
        is_coming = kind is CopyKind.ONBOARD
        slots.append(source if is_coming else destination)
        blocks.append(destination if is_coming else source)
    return slots, blocks


def _wait_for(stream: Stream, marks: Mapping[int, Mark], keys: Iterable[int]) -> None:
    for mark in {marks[key] for key in keys if key in marks}:
        stream.wait(mark)


def _copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=False):
        _copy(destination, source)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)

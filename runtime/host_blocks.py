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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
GROUP = 4  # blocks moved together: kernels, then transfers, so that the link seldom waits


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
                    (NUM_BUFFERS + GROUP, *shape), dtype=torch.uint8, device=queue.device
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
                        self._move_aside(cache, run)
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

    def _move_aside(self, cache: torch.Tensor, copies: Iterable[BlockCopy]) -> None:
        """Bring blocks in, and out what was in their places."""
        self._in.wait(self._main.mark())
        for group in _groups(copies):
            slots, blocks = _ends(group)
            _wait_for(self._in, self._slot_marks, slots)
            self._in.run(partial(self._exchange, cache, group))
            mark = self._in.mark()
            self._slot_marks |= dict.fromkeys(slots, mark)
            self._block_marks |= dict.fromkeys(blocks, mark)

    def _exchange(self, cache: torch.Tensor, group: Sequence[BlockCopy]) -> None:
        """All that leaves, then all that comes: kernels and transfers of a kind together."""
        buffers, slots = list(self._buffers[NUM_BUFFERS:]), self._slots
        leaving = [copy for copy in group if copy.kind is CopyKind.OFFLOAD]
        coming = [copy for copy in group if copy.kind is CopyKind.ONBOARD]
        _copy_each(buffers, [cache[:, copy.src_block] for copy in leaving])
        _copy_each([slots[copy.dst_block] for copy in leaving], buffers)
        _copy_each(buffers, [slots[copy.src_block] for copy in coming])
        _copy_each([cache[:, copy.dst_block] for copy in coming], buffers)

    def _move_at_once(self, cache: torch.Tensor, copies: Iterable[BlockCopy]) -> None:
        """Copies that the next step relies on, or whose blocks it overwrites."""
        for group in _groups(copies):
            source, destination, _, kind = group[0]
            if kind is CopyKind.WITHIN:
                _wait_for(self._main, self._block_marks, (source, destination))
                self._main.run(partial(_copy, cache[:, destination], cache[:, source]))
            else:
                _wait_for(self._main, self._block_marks, _ends(group)[1])
                self._send(cache, group)

    def _send(self, cache: torch.Tensor, group: Sequence[BlockCopy]) -> None:
        """Gather blocks on the main lane, and let them leave beside."""
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
    for source, destination, _, kind in group:
        is_coming = kind is CopyKind.ONBOARD
        slots.append(source if is_coming else destination)
        blocks.append(destination if is_coming else source)
    return slots, blocks


def _wait_for(lane: Lane, marks: Mapping[int, Mark], keys: Iterable[int]) -> None:
    for mark in {marks[key] for key in keys if key in marks}:
        lane.wait(mark)


def _copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=False):
        _copy(destination, source)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)

"""Blocks whose content is being copied from host memory while the device computes other steps.

Copies are handed over in batches, which complete in order. A sequence that was given such a block
does not run before its batch is complete; if a step cannot do without it, the device waits.
"""

from __future__ import annotations

from collections.abc import Iterable


class Arrivals:
    """Which device blocks are being filled, and by which batch. Integers only.

    With `is_on` False every copy counts as complete at once, and nothing is tracked.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._blocks: dict[int, int] = {}  # by block id, the batch that fills it
        self._next_batch = 1
        self._num_arrived = 0  # batches
        self._must_wait = False

    def __len__(self) -> int:
        """Blocks that are being filled."""
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def expect(self, block_id: int) -> None:
        """The next batch to be handed over fills this block."""
        if self._is_on and self._next_batch > self._num_arrived:
            self._blocks[block_id] = self._next_batch

    def need(self, block_id: int) -> None:
        """The next step reads or writes this block, even if it is still being filled."""
        if block_id in self._blocks:
            self.await_all()

    def latest(self, block_ids: Iterable[int]) -> int:
        """The batch after which all of these blocks are filled; 0 if they already are."""
        blocks = self._blocks
        return max((blocks.get(block_id, 0) for block_id in block_ids), default=0) if blocks else 0

    def has_arrived(self, batch: int) -> bool:
        """True once this batch and all before it are complete."""
        return batch <= self._num_arrived

    def hand_over(self) -> int:
        """The number of the batch that is now being copied."""
        batch = self._next_batch
        self._next_batch += 1
        return batch

    def note_arrived(self, batch: int) -> None:
        """This batch and all before it are complete."""
        if batch > self._num_arrived:
            self._num_arrived = batch
            if self._blocks:
                self._blocks = {b: n for b, n in self._blocks.items() if n > batch}

    def await_all(self) -> None:
        """The next step may use every block, and waits for all copies; see `take_wait`."""
        self._num_arrived = self._next_batch
        self._blocks.clear()
        self._must_wait = True

    def take_wait(self) -> bool:
        """True if the next step has to wait for everything that was handed over. Reported once."""
        must_wait, self._must_wait = self._must_wait, False
        return must_wait

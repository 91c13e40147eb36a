"""Copies of whole blocks that must happen before the next step."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class CopyKind(enum.Enum):
    """The direction of a copy."""

    WITHIN = "within"  # device block to device block
    OFFLOAD = "offload"  # device block to host slot
    ONBOARD = "onboard"  # host slot to device block


ALL_GROUPS = -1  # every bit is set


class BlockCopy(NamedTuple):
    """Copy `src_block` to `dst_block`, all layers of some groups, before the step. Only the first
    num_tokens tokens are needed."""

    src_block: int
    dst_block: int
    num_tokens: int
    kind: CopyKind = CopyKind.WITHIN
    groups: int = ALL_GROUPS  # a bit each


Move = tuple[int, int]  # moves one token's keys and values: from and to slots (block id, offset)


class Arrival(Protocol):
    """Copies from host memory that are in flight for one group."""

    def is_done(self) -> bool:
        """True once they are complete. Does not wait; called once per step, and may start more of
        them."""

    def hold(self) -> None:
        """Make all later work on the device wait for them."""


class BlockHolder(Protocol):
    """Holds the contents of one group of KV layers, on the device and in host memory."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order, before the next step. Copies from host memory may complete after
        that step starts, but before any later copy; returns None if everything is complete."""

"""Copies of whole blocks that must happen before the next step."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class CopyKind(enum.Enum):
    """From where to where."""

    WITHIN = "within"  # device block to device block
    OFFLOAD = "offload"  # device block to host slot
    ONBOARD = "onboard"  # host slot to device block


ALL_GROUPS = -1  # every bit is set


class BlockCopy(NamedTuple):
    """Copy `src_block` to `dst_block`, all layers of some groups, before the step. num_tokens
    matter."""

    src_block: int
    dst_block: int
    num_tokens: int
    kind: CopyKind = CopyKind.WITHIN
    groups: int = ALL_GROUPS  # a bit each


Move = tuple[int, int]  # of one token's keys and values: slots (block id, offset) from and to


class Arrival(Protocol):
    """Copies from host memory that a group has under way."""

    def is_done(self) -> bool:
        """True once they are there. Does not wait; asked once a step, it may start more of them."""

    def hold(self) -> None:
        """Let whatever the device is given from now on wait for them."""


class BlockHolder(Protocol):
    """Holds the contents of one group of KV layers, on the device and in host memory."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order, before the next step. What comes from host memory may be late,
        for that step but not for a later copy; None: everything is there."""

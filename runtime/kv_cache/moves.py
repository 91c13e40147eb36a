"""Copies of whole blocks that must happen before the next step."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol


class CopyKind(enum.Enum):
    """From where to where."""

    WITHIN = "within"  # device block to device block
    OFFLOAD = "offload"  # device block to host slot
    ONBOARD = "onboard"  # host slot to device block


class BlockCopy(NamedTuple):
    """Copy `src_block` to `dst_block`, all layers, before the step. num_tokens matter."""

    src_block: int
    dst_block: int
    num_tokens: int
    kind: CopyKind = CopyKind.WITHIN


class Arrival(Protocol):
    """Copies from host memory that an engine has under way."""

    def is_done(self) -> bool:
        """True once they are there. Does not wait; asked once a step, it may start more of them."""

    def hold(self) -> None:
        """Let whatever the device is given from now on wait for them."""

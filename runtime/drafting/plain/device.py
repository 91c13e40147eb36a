"""Plain decoding in device rounds: a round is one token for every request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from llmctl.runtime.drafting.drafter import Described, DeviceChains, OnEveryRank
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.request import Sequence

if TYPE_CHECKING:
    from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class NoDeviceDrafter(DeviceChains, OnEveryRank):
    """See FollowedDrafter for every method."""

    draft_len = 0
    engines = ()
    max_requests: int | None = None
    falls_behind = False

    def describe(self) -> Described:
        """There is one of it."""
        return {"method": PlainDecoding.name}

    def bind(self, steps: DeviceSteps) -> None:
        """Nothing runs."""

    def prepare(self) -> None:
        """Nothing runs."""

    def is_behind(self, sequence: Sequence) -> bool:
        """There is nothing to lack."""
        return False

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """There is nothing to lack."""

    def enqueue_drafts(self, shape: RoundShape) -> None:
        """No drafts."""

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """Nothing to keep."""

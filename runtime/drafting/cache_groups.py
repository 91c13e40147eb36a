"""The groups of KV layers that a target and its drafter have under one block table."""

from __future__ import annotations

from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.kv_cache import BlockHolder

DRAFT_GROUP = 1  # index of the draft engine or head among the groups; the target's is 0


def cache_groups(target: BlockHolder, drafter: Drafter) -> dict[str, BlockHolder]:
    """The holder of each group's contents, by name and in the order of the group indices."""
    return {"target": target, **drafter.holders}

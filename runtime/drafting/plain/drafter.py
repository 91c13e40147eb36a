"""Plain decoding, as the draft method that never drafts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Request, Sequence


class NoDrafter(WithoutWindow):
    """See Drafter for every method."""

    max_draft_len = 0
    holders: Mapping[str, BlockHolder] = MappingProxyType({})

    def check(self, request: Request) -> None:
        """See Drafter. Raises also BadConfig for a rule of acceptance, which would have no effect
        but that of keeping the request out of device rounds."""
        super().check(request)
        if request.sampling_config.accepts_typical:
            raise BadConfig(
                "the request has typical acceptance of drafts, and the executor has none",
                fix="leave typical_acceptance out, or open the engine with a method that drafts",
            )

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """No drafts for anyone."""
        return [Drafts()] * len(batch.generation)

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Nothing to keep."""

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""

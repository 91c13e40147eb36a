"""What the loop asks of a method of drafting."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import Arrival, BlockCopy, KvCacheManager
from llmctl.runtime.request import Batch, Sequence


@dataclass(slots=True)
class Proposal:
    """Drafts for one generation slice, in order; no more than its draft_len, possibly none.

    `probs` [len(token_ids), target vocab] are the distributions the drafts were really drawn from;
    None says the drafts are to be accepted by tokens. `num_forced` drafts stand whatever the target
    says; None outside of benchmarks (runtime/generate/synthetic_acceptance.py).
    """

    token_ids: list[int] = field(default_factory=list)
    probs: NDArray[np.float64] | None = None
    num_forced: int | None = None


class Drafter(Protocol):
    """Proposes drafts and keeps whatever state that needs. Called by the loop's thread only."""

    max_draft_len: int  # most drafts it proposes a round
    has_engine: bool  # True when it keeps a KV cache of its own under the target's block ids

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Called once, before any round: make room for the target's block ids and take the
        sampler of the target. With `keep_probs`, sampled drafts come with their distributions
        (accept by logits); a method with one-hot proposals has none to give."""

    def copy_blocks(self, copies: Items[BlockCopy]) -> Arrival | None:
        """Copy blocks of the drafter's own KV cache; see StepRunner."""

    def propose(self, batch: Batch) -> list[Proposal]:
        """One proposal per generation slice. Context slices are fed to a draft engine here."""

    def commit(self, batch: Batch, accepted: Items[int]) -> None:
        """The round is over: `accepted[i]` drafts of generation slice i stand, and the sequences
        carry their new tokens."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, for any reason."""


class NoDrafter:
    """Plain decoding."""

    max_draft_len = 0
    has_engine = False

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare."""

    def copy_blocks(self, copies: Items[BlockCopy]) -> None:
        """Nothing to copy."""

    def propose(self, batch: Batch) -> list[Proposal]:
        """No drafts for anyone."""
        return [Proposal()] * len(batch.generation)

    def commit(self, batch: Batch, accepted: Items[int]) -> None:
        """Nothing to keep."""

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""

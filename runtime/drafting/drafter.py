"""What the loop, and rounds on a device, ask of a method of drafting."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence

if TYPE_CHECKING:
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class Drafter(Protocol):
    """Proposes drafts and keeps whatever state that needs. Called by the loop's thread only."""

    max_draft_len: int  # most drafts it proposes a round
    holders: Mapping[str, BlockHolder]  # caches of its own under the target's block ids, by name

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Called once, before any round: make room for the target's block ids and take the
        sampler of the target. With `keep_probs`, sampled drafts come with their distributions
        (accept by logits); a method with one-hot proposals has none to give."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Drafts of every generation slice. Context slices are fed to a draft engine here."""

    def commit(self, batch: Batch, accepted: Items[int]) -> None:
        """The round is over: `accepted[i]` drafts of generation slice i were accepted, and the
        sequences carry their new tokens."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, for any reason."""


class DeviceDrafter(Protocol):
    """Drafts where the device leads a round: what it enqueues, and what the host must know of it.

    Everything but `enqueue_drafts` is called between rounds, or for rounds that are read.
    """

    draft_len: int  # drafts a round, at most; 0: plain decoding
    max_requests: int | None  # of a round, by its engines' limits; None: no limit of its own
    falls_behind: bool  # True where a round without drafts leaves tokens that its cache lacks

    @property
    def engines(self) -> tuple[CudaEngine, ...]:
        """What it runs beside the target."""

    def bind(self, steps: DeviceSteps) -> None:
        """Called once, before anything else: how it runs steps and draws tokens."""

    def prepare(self) -> None:
        """Pack ahead what `catch_up` launches. Caches are there, and no sequence yet."""

    def is_behind(self, sequence: Sequence) -> bool:
        """True when its cache lacks more of the sequence than a round feeds."""

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """Compute what its cache lacks, up to what a round feeds. No round is in flight."""

    def enqueue_drafts(self, shape: RoundShape) -> None:
        """Enqueue the drafts of a round into the request state; does not wait. Captured as a CUDA
        graph, so it may depend on `shape` alone."""

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """A round of `draft_len` drafts was read: `accepted` of them followed the `committed`
        tokens, and the sequence carries its new tokens."""

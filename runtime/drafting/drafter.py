"""The interface between a draft method and the loop or device rounds."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol, Self

from llmctl.errors import Unsupported
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Request, Sequence

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.device_loop.trees import DraftTrees
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class Drafter(Protocol):
    """Proposes drafts and keeps the state for that. Called only by the loop's thread."""

    max_draft_len: int  # the most drafts it proposes per round
    # its own KV caches, indexed by the target's block ids, by name
    holders: Mapping[str, BlockHolder]

    def check(self, request: Request) -> None:
        """Called once for every request, before it starts. Raises BadConfig or Unsupported where
        it asks for drafts of a kind or size that this drafter has not."""

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Called once, before any round: allocate caches for the target's block ids and keep the
        target's sampler. With `keep_probs`, sampled drafts come with their distributions
        (acceptance by logits); a method with one-hot proposals has none to give."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Drafts for every generation slice. A draft engine also reads the context slices here."""

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """The round is over: `accepted[i]` drafts of generation slice i were accepted, and the
        sequences contain their new tokens. `drawn`: the target's own token at every row of the
        step, in packed order; those of the generation slices, a root and its drafts each, end it.
        """

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, for any reason."""


class WithoutWindow:
    """What a drafter says of requests where it has no window of lookahead decoding."""

    def check(self, request: Request) -> None:
        """See Drafter. Raises Unsupported."""
        if request.lookahead_config is not None:
            raise Unsupported(
                f"lookahead_config is [{request.lookahead_config}]; the executor drafts otherwise",
                fix='leave it out, or open the engine with --lookahead-config "[W,N,G]"',
            )


class DeviceDrafter(Protocol):
    """Drafting in device rounds: what it enqueues, and what the host has to know about it.

    All methods except `enqueue_drafts` are called between rounds, or for rounds that have been
    read. `DeviceChains` has what chains do of those about trees.
    """

    draft_len: int  # the most drafts per round; 0: plain decoding
    max_requests: int | None  # the most requests per round, by its engines' limits; None: no limit
    falls_behind: bool  # True if its cache lacks tokens after a round without drafts
    # of the steps that it runs besides those of engines, to be kept as theirs are
    block_tables: Items[torch.Tensor]

    @property
    def engines(self) -> tuple[CudaEngine, ...]:
        """The engines that it runs besides the target."""

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees | None:
        """Called once, before anything else: the request state for trees of so many nodes; None
        for a drafter of chains."""

    def bind(self, steps: DeviceSteps) -> None:
        """Called once, before what follows, with what runs steps and draws tokens."""

    def prepare(self) -> None:
        """Pack the launches of `catch_up` in advance. Caches exist, and no sequence has started."""

    def branches(self, draft_len: int) -> bool:
        """Whether so many drafts may branch; those that do not are verified as chains are."""

    def depth(self, draft_len: int) -> int:
        """The most of so many drafts that a round can accept."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether a round can begin with the sequence; if not, the host controls its next step."""

    def begin(self, sequences: Items[Sequence]) -> None:
        """These are the sequences of the next rounds, in their order in the request state: write
        what drafting keeps of each there. No round is in flight."""

    def end(self, nodes: Items[int], draft_len: int) -> None:
        """A round of trees was read: the node of each sequence's last accepted draft, 0 for
        none."""

    def is_behind(self, sequence: Sequence) -> bool:
        """True when its cache lacks more tokens of the sequence than a round reads."""

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """Compute what its cache lacks, up to the tokens that a round reads. No round is in
        flight."""

    def enqueue_drafts(self, shape: RoundShape) -> None:
        """Enqueue the drafting of a round, which writes to the request state; does not wait.
        Captured as a CUDA graph, so it may depend only on `shape`."""

    def reads(self, draft_len: int) -> bool:
        """Whether it reads what a round of so many drafts committed; 0: one without drafts."""

    def enqueue_reading(self, shape: RoundShape) -> None:
        """Enqueue the reading of what a round committed, behind its acceptance; only called if it
        `reads` such a round. As `enqueue_drafts` otherwise."""

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """A round of `draft_len` drafts was read: `accepted` of them followed the `committed`
        tokens, and the sequence carries its new tokens. Not called for rounds without drafts unless
        it `reads` them."""

    def followed(self) -> FollowedDrafter | None:
        """Itself, where every rank with a GPU of its own can draft as rank 0 does; None where its
        state is rank 0's alone, which leads every step then. See `OnEveryRank` and `OnRank0`."""


Described = Mapping[str, Any]  # a drafter, as JSON has it; "method": the name of its DraftMethod


class FollowedDrafter(DeviceDrafter, Protocol):
    """A drafter of rank 0 that other ranks make the same of, by `follow` of its method's class.

    A rank's host knows of a sequence what a round begins with: `start_of` has what that is besides
    its tokens and how they are drawn."""

    def describe(self) -> Described:
        """What the others make it of."""

    def start_of(self, sequence: Sequence) -> Any:
        """What a round of the sequence begins with, as JSON has it. Called before `begin`."""

    def note_start(self, sequence: Sequence, start: Any) -> None:
        """It is that, says rank 0. Called before `begin`, on the other ranks."""


class OnEveryRank:
    """What a drafter says of other ranks where rounds begin with the tokens. See
    FollowedDrafter."""

    def followed(self) -> Self:
        """Itself."""
        return self

    def start_of(self, sequence: Sequence) -> Any:
        """Nothing."""
        return None

    def note_start(self, sequence: Sequence, start: Any) -> None:
        """Nothing to note."""


class OnRank0:
    """What a drafter says of other ranks whose state is rank 0's alone. See DeviceDrafter."""

    def followed(self) -> None:
        """No rank can."""
        return None


class NeverReads:
    """What a drafter does that keeps nothing of a round but its tokens. See DeviceDrafter."""

    block_tables: Items[torch.Tensor] = ()

    def reads(self, draft_len: int) -> bool:
        """Never."""
        return False

    def enqueue_reading(self, shape: RoundShape) -> None:
        """Nothing to read."""


class DeviceChains(NeverReads):
    """What a drafter of chains does where trees are asked about. See DeviceDrafter."""

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees | None:
        """None."""
        return None

    def branches(self, draft_len: int) -> bool:
        """Never."""
        return False

    def depth(self, draft_len: int) -> int:
        """All of them."""
        return draft_len

    def can_draft(self, sequence: Sequence) -> bool:
        """Its tokens are enough."""
        return True

    def begin(self, sequences: Items[Sequence]) -> None:
        """Nothing but what every round has."""

    def end(self, nodes: Items[int], draft_len: int) -> None:
        """Nothing to keep."""

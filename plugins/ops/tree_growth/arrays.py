"""What trees that grow in rounds keep of requests on a device, beside `DraftTrees`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.ops.sampling.arrays import CHUNK

if TYPE_CHECKING:
    import torch

MOST_OFFERS = 16  # tokens that may follow one draft
MOST_WIDTH = 16  # drafts of a level that are followed further
LEAST_NODES = 63  # drafts that the kernels of every engine are for
NOTES = 5  # rows of `notes`


@dataclass(frozen=True, slots=True)
class GivenTree:
    """A tree that is given: nodes 1, 2, ..., the most useful first, behind node 0, the root. One of
    n drafts has the first n.

    children[node][rank]: the node that is the rank-th offer behind a node; 0: none.
    """

    children: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...]  # of nodes 1, 2, ...

    @classmethod
    def of(cls, paths: Sequence[tuple[int, ...]]) -> GivenTree:
        """Of the ranks on the way to each node, a parent before its children."""
        number = {path: index for index, path in enumerate(((), *paths))}
        most = 1 + max(path[-1] for path in paths)
        return cls(
            tuple(tuple(number.get((*path, rank), 0) for rank in range(most)) for path in number),
            tuple(map(len, paths)),
        )

    @property
    def num_offers(self) -> int:
        """Children of a node that have a rank."""
        return len(self.children[0])

    @property
    def width(self) -> int:
        """The most nodes of a level that have children."""
        inner = [
            self.depths[node - 1] for node, own in enumerate(self.children) if node and any(own)
        ]
        return max(map(inner.count, inner), default=1)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """num_offers: children of a draft; width: drafts of a level that are followed; depth: drafts of
    the longest path. As DynamicShape of runtime/drafting/growth/ has them.

    given: of a tree that is given instead: the best of all offers are drafted otherwise.
    """

    num_offers: int
    width: int
    depth: int
    given: GivenTree | None = None

    @property
    def is_followed_one_by_one(self) -> bool:
        """Whether the drafts that are followed are a chain, and a level is a step of a chain."""
        return self.width == 1

    def fits(self, draft_len: int, limits: StepLimits) -> bool:
        """Whether an engine of these limits has kernels for trees of so many drafts."""
        if self.num_offers > MOST_OFFERS or self.width > MOST_WIDTH:
            return False
        if self.is_followed_one_by_one:
            return draft_len <= most_nodes(limits)
        # A level has a row for each draft that is followed, and a path may be as long as that.
        most = max(self.width, self.levels(draft_len))
        return limits.takes_trees and most <= 1 + limits.max_draft_len

    def levels(self, draft_len: int) -> int:
        """Levels of a tree of so many drafts."""
        found = min(self.depth, draft_len)
        return found if self.given is None else max(self.given.depths[:draft_len], default=0)

    def places(self, level: int, draft_len: int) -> int:
        """Of the drafts that have a key when a level is computed (1: behind the root's children),
        at the most."""
        return level if self.is_followed_one_by_one else min(level * self.width, draft_len - 1)

    def keys_of_tree(self, level: int, draft_len: int) -> int:
        """`StepShape.max_tree_len` of the step that computes a level; 0 where that is one of
        chains."""
        return 0 if self.is_followed_one_by_one else 1 + self.places(level, draft_len)


def most_nodes(limits: StepLimits) -> int:
    """The most drafts of trees that kernels of an engine of these limits are for."""
    return max(1 + limits.max_draft_len, LEAST_NODES)


@dataclass(frozen=True, slots=True)
class GrowthArrays:
    """Of B requests whose trees have up to K drafts, O offers and W followed drafts of a level.

    Draft i of a request, its token and the node that it follows are where `RoundState.drafts` and
    `DraftTrees.parents` have them; those that a tree has so far are in the order in which they were
    offered. A draft that is followed has its key at a place behind the root (1, 2, ...).
    """

    shape: TreeShape
    keys: torch.Tensor  # int64 [B * W, chunks, O]: the likeliest of each chunk of a row
    sums: torch.Tensor  # float32 [B * W, chunks, 2]: largest logit, sum of exponentials
    ids: torch.Tensor  # int32 [B * W, O]: what a row offers, the likeliest first
    values: torch.Tensor  # float32 [B * W, O]: their log-probabilities; -inf: nothing
    chosen: torch.Tensor  # float32 [B, V]: the rows of logits that sampled requests draw from
    drawn: torch.Tensor  # int32 [B * W]: what they drew, each in the place of its first row
    roots: torch.Tensor  # int32 [B]: 0, 1, ...: the rows of logits of the roots
    rows: torch.Tensor  # int32 [B * W]: those of the drafts that are followed
    sources: torch.Tensor  # int32 [B * (K + 1)]: the row behind which a token is computed
    ends: torch.Tensor  # int32 [B]: the id that ends the text, or -1
    scores: torch.Tensor  # float64 [B, K]: log-probability of a draft's path
    places: torch.Tensor  # int32 [B, K]: of its key; 0: none
    kinds: torch.Tensor  # int32 [B, K]: which node of a given tree it is
    children: torch.Tensor  # int32 [nodes, O] of a given tree; one row of zeros where none is
    frontier: torch.Tensor  # int32 [B, W]: 1 + the drafts that are followed next; 0: none
    ranking: torch.Tensor  # float64 [B, K + W * O]: scratch
    notes: torch.Tensor  # int32 [B, NOTES, K + W * O + 1]: scratch
    starts: torch.Tensor  # int32 [B + 1]: prefix sums of each request's moves
    moves: torch.Tensor  # int32 [B * K, 2]: cache slots from and to, as kv_compact takes them

    @classmethod
    def allocate(
        cls,
        max_batch_size: int,
        max_draft_len: int,
        shape: TreeShape,
        vocab_size: int,
        device: str | torch.device,
    ) -> GrowthArrays:
        """Arrays without requests."""
        import torch

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        batch, width, offers = max_batch_size, shape.width, shape.num_offers
        rows, chunks = batch * width, -(-vocab_size // CHUNK)
        span = max_draft_len + width * offers
        known = [[0] * offers] if shape.given is None else shape.given.children
        children = torch.tensor(known, dtype=torch.int32)
        return cls(
            shape=shape,
            keys=zeros(rows, chunks, offers, dtype=torch.int64),
            sums=zeros(rows, chunks, 2, dtype=torch.float32),
            ids=zeros(rows, offers),
            values=zeros(rows, offers, dtype=torch.float32),
            chosen=zeros(batch, vocab_size, dtype=torch.float32),
            drawn=zeros(rows),
            roots=torch.arange(batch, dtype=torch.int32, device=device),
            rows=zeros(rows),
            sources=zeros(batch * (max_draft_len + 1)),
            # No difference of tensors: where only their size is asked for (device "meta"), torch
            # imports its compiler to compute one, which takes seconds.
            ends=torch.full((batch,), -1, dtype=torch.int32, device=device),
            scores=zeros(batch, max_draft_len, dtype=torch.float64),
            places=zeros(batch, max_draft_len),
            kinds=zeros(batch, max_draft_len),
            children=children.to(device),
            frontier=zeros(batch, width),
            ranking=zeros(batch, span, dtype=torch.float64),
            notes=zeros(batch, NOTES, span + 1),
            starts=zeros(batch + 1),
            moves=zeros(batch * max_draft_len, 2),
        )


def growth_bytes(max_batch_size: int, max_draft_len: int, vocab_size: int) -> int:
    """Device memory of the widest trees that the kernels are for."""
    shape = TreeShape(MOST_OFFERS, MOST_WIDTH, max_draft_len)
    arrays = GrowthArrays.allocate(max_batch_size, max_draft_len, shape, vocab_size, "meta")
    names = [name for name in arrays.__slots__ if name != "shape"]
    return sum(int(getattr(arrays, name).nbytes) for name in names)

"""The trees that speculative rounds draft, in the request state beside chains (state.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.ops.sampling.arrays import SamplingArrays

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Trees of up to K drafts for up to B requests. All int32, on the device.

    Node 0 of a request is its root; node i + 1 is draft i, whose token is in `RoundState.drafts`.
    A round of k drafts verifies the first min(k, counts[b]) of them, as far as the request's blocks
    and its max_len have room for a token each; the others take no part. A verification has k + 1
    rows of logits for each request: row b * (k + 1) + i is that of node i.
    """

    parents: torch.Tensor  # [B, K] the node that draft i follows: at most i
    counts: torch.Tensor  # [B] drafts that the request has
    rows: torch.Tensor  # [B] or more: the row of the last step whose logits gave the root
    positions: torch.Tensor  # [B * (K + 1)] of the token that each row draws
    starts: torch.Tensor  # [B + 1] prefix sums of the moves of each request
    moves: torch.Tensor  # [B * K, 2] cache slots from and to, as kv_compact takes them
    sampling: SamplingArrays  # of each row, [B * (K + 1)]

    @classmethod
    def allocate(
        cls,
        max_batch_size: int,
        max_draft_len: int,
        device: str | torch.device,
        rows: torch.Tensor | None = None,
    ) -> DraftTrees:
        """Trees that are chains of K drafts. `rows`: int32 memory for them, where what reads those
        rows finds them; made if None."""
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        chain = torch.arange(max_draft_len, dtype=torch.int32, device=device)
        # No sum, see GrowthArrays.
        counts = torch.full((max_batch_size,), max_draft_len, dtype=torch.int32, device=device)
        num_rows = max_batch_size * (max_draft_len + 1)
        return cls(
            parents=chain.repeat(max_batch_size, 1),
            counts=counts,
            rows=zeros(max_batch_size) if rows is None else rows,
            positions=zeros(num_rows),
            starts=zeros(max_batch_size + 1),
            moves=zeros(max_batch_size * max_draft_len, 2),
            sampling=SamplingArrays.allocate(num_rows, device),
        )

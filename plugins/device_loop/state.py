"""The request state that speculative rounds keep on the device, and the records of a round.

A round drafts k tokens, verifies them in one target step and accepts some of them, all without the
host. Request b is padding, and nothing of it is read or written, while committed[b] == 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.ops.sampling.arrays import SamplingArrays

if TYPE_CHECKING:
    import torch

# Columns of a record: committed tokens before the round, accepted drafts a, emitted tokens a + 1,
# drafts that there were, then the emitted tokens, and zeros. Where drafts are trees the second is
# the node of the last accepted draft (trees.py), which in a chain is a as well.
RECORD_COMMITTED, RECORD_ACCEPTED, RECORD_EMITTED, RECORD_DRAFTS, RECORD_TOKENS = range(5)


@dataclass(frozen=True, slots=True)
class RoundState:
    """Up to B requests that draft up to K tokens a round. All int32, on the device.

    A request has `committed` tokens; the last is `root`, at position committed - 1, and the one
    before it is `previous`. Its blocks hold positions below `capacity`, and it never has more than
    `max_len` tokens.
    """

    root: torch.Tensor  # [B]
    previous: torch.Tensor  # [B]
    num_read: torch.Tensor  # [B] tokens that what drafted a chain has in its cache, at least
    committed: torch.Tensor  # [B]; 0: padding, otherwise at least 2
    max_len: torch.Tensor  # [B]
    capacity: torch.Tensor  # [B]
    drafts: torch.Tensor  # [B, K] drafted tokens of this round
    targets: torch.Tensor  # [B * (K + 1)]; row b * (k + 1) + i: the target's draw after i drafts
    counter: torch.Tensor  # [1] finished rounds
    ring: torch.Tensor  # [slots, B, RECORD_TOKENS + K + 1]; round r reports in slot r % slots
    sampling: SamplingArrays

    @property
    def max_batch_size(self) -> int:
        """B."""
        return len(self.root)

    @property
    def max_draft_len(self) -> int:
        """K."""
        return self.drafts.shape[1]

    @classmethod
    def allocate(
        cls,
        max_batch_size: int,
        max_draft_len: int,
        device: str | torch.device,
        *,
        slots: int = 8,
        ring: torch.Tensor | None = None,
    ) -> RoundState:
        """State without requests. `ring`: where records go, [slots, B, RECORD_TOKENS + K + 1] int32
        memory that the device can write (pinned host memory too); made on the device if None."""
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        if ring is None:
            ring = zeros(slots, max_batch_size, RECORD_TOKENS + max_draft_len + 1)
        return cls(
            root=zeros(max_batch_size),
            previous=zeros(max_batch_size),
            num_read=zeros(max_batch_size),
            committed=zeros(max_batch_size),
            max_len=zeros(max_batch_size),
            capacity=zeros(max_batch_size),
            drafts=zeros(max_batch_size, max_draft_len),
            targets=zeros(max_batch_size * (max_draft_len + 1)),
            counter=zeros(1),
            ring=ring,
            sampling=SamplingArrays.allocate(max_batch_size, device),
        )

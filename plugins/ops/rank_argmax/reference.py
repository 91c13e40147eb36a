"""The best id of each row of logits that ranks have shares of: the argmax of the shares side by
side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmctl.plugins.ops.all_gather.reference import gather_ranks


def argmax_ranks(shares: Sequence[torch.Tensor], vocab: int) -> torch.Tensor:
    """int32 [rows]: the lowest id on ties, -1 for a row with NaN. shares: float32 [rows, own] of
    each rank, whose ids behind `vocab` are padding."""
    logits = torch.empty((len(shares[0]), vocab), device=shares[0].device)
    gather_ranks(shares, {"out": logits})
    is_best = logits == logits.amax(dim=1, keepdim=True)
    # torch's argmax does not say which of equal numbers it takes.
    first = torch.where(is_best, torch.arange(vocab, device=logits.device), vocab).amin(dim=1)
    return torch.where(logits.isnan().any(dim=1), -1, first).int()

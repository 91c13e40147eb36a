"""The likeliest ids of chunks of rows of which ranks have shares, and what a softmax needs of each
chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LARGE = 1e38  # logits are cut to it; NaN is the least likely


def list_shares(
    shares: Sequence[torch.Tensor], vocab: int, count: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [rows, chunks, count] int64, (largest logit, sum of exponentials behind it) [rows,
    chunks, 2] float32) of the chunks of all ranks, one rank's behind the other's.

    shares: float32 [rows, own] of each rank, whose ids behind `vocab` are padding. A key orders as
    (logit, lower id) do; 0 is behind the last.
    """
    keys, sums = [], []
    for rank, share in enumerate(shares):
        for first in range(0, share.shape[1], chunk):
            x = share[:, first : first + chunk].nan_to_num(-LARGE).clamp(-LARGE, LARGE) + 0.0
            ids = rank * share.shape[1] + first + torch.arange(x.shape[1])
            x, ids = x[:, ids < vocab], ids[ids < vocab]
            bits = x.view(torch.int32).long()
            order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + (1 << 31)
            found = torch.zeros((len(x), count), dtype=torch.int64)
            most = min(count, len(ids))
            found[:, :most] = (order << 31 | (0x7FFFFFFF - ids)).sort(1, descending=True)[0][
                :, :most
            ]
            top = x.amax(1) if len(ids) else torch.full((len(x),), -LARGE)
            keys.append(found)
            sums.append(torch.stack((top, (x - top[:, None]).exp().sum(1)), dim=1))
    return torch.stack(keys, dim=1), torch.stack(sums, dim=1)

"""Rows of logits that ranks have parts of."""

from __future__ import annotations

import random

import torch

NAN, INF = float("nan"), float("inf")


def shares_of(ranks: int, own: int, vocab: int, rows: int, seed: int) -> list[torch.Tensor]:
    """Rows with everything that a tie, a NaN or padding could get wrong; the rest is normal."""
    draw = random.Random(seed)
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))
    for row in logits:
        places = draw.sample(range(vocab), 3)
        kind = draw.randrange(8)
        if kind == 0:
            row[places] = 7.0  # three alike, perhaps of several ranks
        elif kind == 1:
            row[places[0]] = NAN
        elif kind == 2:
            row.fill_(-INF)
        elif kind == 3:
            row.clamp_(max=-1.0)[places] = torch.tensor([0.0, -0.0, 0.0])
        elif kind == 4:
            row.sub_(100.0)  # below the zeros of padding
        elif kind == 5:
            row[places[:2]] = torch.tensor([INF, -INF])
    padding = torch.zeros((rows, ranks * own - vocab))
    whole = torch.cat([logits, padding], dim=1)
    return [part.contiguous() for part in whole.split(own, dim=1)]

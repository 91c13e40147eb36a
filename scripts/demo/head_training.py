"""Training draft heads on rows of a frozen target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.head_rows import HeadRows
from scripts.demo.heads import MedusaHeads
from scripts.demo.training import Schedule

DECAY = 0.8  # weight of a head's loss over that of the head before


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How often heads said what the target then chose, where the text until there was its own.

    first[m], ten[m]: head m's likeliest token, one of its ten likeliest. per_position[m]: head m's
    likeliest, where those of the heads before it were right. tokens_per_round: of a chain, the
    target's own token included.
    """

    positions: int
    first: list[float]
    ten: list[float]
    per_position: list[float]
    tokens_per_round: float


def train_medusa(
    heads: MedusaHeads,
    projection: Tensor,
    rows: HeadRows,
    schedule: Schedule,
    batch: int,
    validate: Callable[[MedusaHeads], Accuracy],
    seed: int,
) -> list[tuple[int, list[float]]]:
    """Cross-entropy of what the target chooses, positions drawn at random; the last validations.

    projection [vocab, hidden] is the target's and stays as it is. Raises nothing.
    """
    depths = rows.depths(len(heads.heads))
    length = depths[0][0].shape[1]
    hidden = rows.hidden[:, :length].flatten(0, 1)
    labels = [label.flatten() for label, _ in depths]
    counts = [count.flatten() for _, count in depths]
    fixed = projection.bfloat16()
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
    )
    history: list[tuple[int, list[float]]] = []
    began = time.perf_counter()
    chosen = _draw(counts[0].nonzero()[:, 0], batch, seed)
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        at = next(chosen)
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for index, head in enumerate(heads.heads):
                own = at[counts[index][at]]
                logits = F.linear(head(hidden[own].float()), fixed).float()
                lost = F.cross_entropy(logits, labels[index][own], reduction="sum")
                loss = loss + DECAY**index * lost / len(at)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(heads.parameters(), schedule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * 10 // schedule.num_steps > step * 10 // schedule.num_steps:
            found = validate(heads)
            history.append((step + 1, found.first))
            print(
                f"step {step + 1}/{schedule.num_steps} loss {loss.item():.3f} held-out "
                f"{', '.join(f'{share:.3f}' for share in found.first)} "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return history


@torch.no_grad()
def measure(heads: MedusaHeads, projection: Tensor, rows: HeadRows, start: int = 0) -> Accuracy:
    """Over the positions of rows from `start` on."""
    depths = rows.depths(len(heads.heads))
    length = depths[0][0].shape[1]
    right, ten, alive = [], [], []
    is_alive = depths[0][1][:, start:]
    for head, (label, count) in zip(heads.heads, depths, strict=True):
        states = head(rows.hidden[:, start:length].float())
        best = F.linear(states.bfloat16(), projection.bfloat16()).topk(10, -1).indices
        hits = best == label[:, start:, None]
        counted = count[:, start:]
        right.append(_share(hits[..., 0], counted))
        ten.append(_share(hits.any(-1), counted))
        alive.append(_share(hits[..., 0], is_alive & counted))
        is_alive = is_alive & counted & hits[..., 0]
    lengths = [math.prod(alive[: head + 1]) for head in range(len(alive))]
    positions = int(depths[0][1][:, start:].sum())
    return Accuracy(positions, right, ten, alive, 1 + sum(lengths))


def _share(hits: Tensor, counted: Tensor) -> float:
    return float((hits & counted).sum() / counted.sum().clamp(min=1))


def _draw(places: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of places without end, each place once in a pass."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = places[torch.randperm(len(places), generator=random)]
        yield from (part for part in order.split(batch) if len(part) == batch or len(order) < batch)

"""Training draft heads on rows of a frozen target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.head_rows import HeadRows
from scripts.demo.heads import DraftHeads
from scripts.demo.training import Schedule

IGNORED = -100  # label of a position that does not count
AT_A_TIME = 2048  # positions that are measured together
DECAY = 0.8  # weight of a head's loss over that of the head before


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How often heads said what the target then chose, where the text until there was its own.

    first[m], ten[m]: head m's likeliest token, one of its ten likeliest. per_position[m]: head m's
    likeliest, where those of the heads before it were right. tokens_per_round: of chains, the
    target's own token included, when each round begins where the one before ended: such places are
    harder than the average position.
    """

    positions: int
    first: list[float]
    ten: list[float]
    per_position: list[float]
    tokens_per_round: float


def train_heads(
    heads: DraftHeads,
    rows: HeadRows,
    schedule: Schedule,
    batch: int,
    validate: Callable[[], Accuracy],
    seed: int,
) -> list[tuple[int, list[float]]]:
    """Cross-entropy of what the target chooses, positions drawn at random; ten validations."""
    depths = rows.depths(heads.num_depths)
    length = depths[0][0].shape[1]
    hidden = rows.hidden[:, :length].flatten(0, 1)
    tokens = rows.following(heads.num_depths).flatten(0, 1)
    labels = [torch.where(count, label, IGNORED).flatten() for label, count in depths]
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
    )
    history: list[tuple[int, list[float]]] = []
    began = time.perf_counter()
    chosen = _draw((labels[0] != IGNORED).nonzero()[:, 0], batch, seed)
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        at = next(chosen)
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            found = heads.logits(hidden[at].float(), tokens[at])
            for depth, logits in enumerate(found):
                wanted = labels[depth][at]
                lost = F.cross_entropy(
                    logits.float(), wanted, reduction="sum", ignore_index=IGNORED
                )
                loss = loss + DECAY**depth * lost / len(at)
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.nn.utils.clip_grad_norm_(heads.parameters(), schedule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * 10 // schedule.num_steps > step * 10 // schedule.num_steps:
            accuracy = validate()
            history.append((step + 1, accuracy.first))
            print(
                f"step {step + 1}/{schedule.num_steps} loss {loss.item():.3f} held-out "
                f"{', '.join(f'{share:.3f}' for share in accuracy.first)} "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return history


@torch.no_grad()
def measure(heads: DraftHeads, rows: HeadRows, start: int = 0) -> Accuracy:
    """Over the positions of rows from `start` on."""
    length = rows.tokens.shape[1] - heads.num_depths - 1
    hidden = rows.hidden[:, start:length].flatten(0, 1)
    tokens = rows.following(heads.num_depths)[:, start:].flatten(0, 1)
    best: list[list[Tensor]] = [[] for _ in range(heads.num_depths)]
    for part in torch.arange(len(hidden)).split(AT_A_TIME):
        with torch.autocast("cpu", torch.bfloat16):
            found = heads.logits(hidden[part].float(), tokens[part])
        for depth, logits in enumerate(found):
            best[depth].append(logits.topk(10, -1).indices)
    shape = (len(rows.tokens), length - start, 10)
    return accuracy_of([torch.cat(tops).view(shape) for tops in best], rows, start)


def accuracy_of(tops: list[Tensor], rows: HeadRows, start: int = 0) -> Accuracy:
    """From the ten likeliest tokens of each depth [rows, positions from `start` on, 10]."""
    depths = rows.depths(len(tops))
    right, ten, alive, lengths = [], [], [], []
    is_alive = depths[0][1][:, start:]
    for (label, count), own in zip(depths, tops, strict=True):
        hits = own == label[:, start:, None]
        counted = count[:, start:]
        right.append(_share(hits[..., 0], counted))
        ten.append(_share(hits.any(-1), counted))
        alive.append(_share(hits[..., 0], is_alive & counted))
        is_alive = is_alive & counted & hits[..., 0]
        lengths.append(is_alive.long())
    positions = int(depths[0][1][:, start:].sum())
    return Accuracy(positions, right, ten, alive, _walk(torch.stack(lengths).sum(0)))


def _walk(accepted: Tensor) -> float:
    """Tokens a round along rows [rows, positions] of how many drafts a round there would accept."""
    rounds = tokens = 0
    for row in accepted.tolist():
        at = 0
        while at < len(row):
            rounds, tokens = rounds + 1, tokens + 1 + row[at]
            at += 1 + row[at]
    return tokens / rounds


def _share(hits: Tensor, counted: Tensor) -> float:
    return float((hits & counted).sum() / counted.sum().clamp(min=1))


def _draw(places: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of places without end, each place once in a pass."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = places[torch.randperm(len(places), generator=random)]
        yield from (part for part in order.split(batch) if len(part) == batch or len(order) < batch)

"""Training draft heads on rows of a frozen target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.head_rows import HeadRows
from scripts.demo.heads import DraftHeads
from scripts.demo.training import Schedule, fit, mixed, product_dtype

AT_A_TIME = 2048  # positions that are measured together
DECAY = 0.8  # weight of a head's loss over that of the head before
CHOSEN = 0.5  # share of what the target chooses in what is learned; the rest is its distribution


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


@dataclass(frozen=True, slots=True)
class _Labels:
    """Rows as one line of positions, and what heads shall say there. A place is the number of a
    position, of which only those with all depths behind them are drawn."""

    num_depths: int
    tokens: Tensor  # [places]
    hidden: Tensor  # [places, hidden_size]
    chosen: Tensor  # [places]
    counts: Tensor  # bool [places, num_depths]

    @classmethod
    def from_rows(cls, rows: HeadRows, num_depths: int) -> _Labels:
        counts = torch.stack([count for _, count in rows.depths(num_depths)], -1)
        missing = rows.tokens.shape[1] - counts.shape[1]
        counts = F.pad(counts, (0, 0, 0, missing))
        return cls(
            num_depths,
            rows.tokens.flatten(),
            rows.hidden.flatten(0, 1),
            rows.chosen.flatten(),
            counts.flatten(0, 1),
        )

    def of(self, at: Tensor) -> tuple[Tensor, ...]:
        """What `_lost` reads of places [n]."""
        ahead = at[:, None] + torch.arange(1, self.num_depths + 1, device=at.device)
        return (
            self.hidden[at], self.tokens[ahead], self.hidden[ahead], self.chosen[ahead],
            self.counts[at],
        )  # fmt: skip


def train_heads(
    heads: DraftHeads,
    rows: HeadRows,
    projection: Tensor,
    schedule: Schedule,
    batch: int,
    validate: Callable[[], Accuracy],
    seed: int,
) -> list[tuple[int, list[float]]]:
    """Cross-entropy of what the target says, positions drawn at random; ten validations.
    projection: the target's output matrix."""
    labels = _Labels.from_rows(rows, heads.num_depths)
    device = rows.tokens.device
    drawn = _draw(labels.counts[:, 0].nonzero()[:, 0], batch, seed)
    projection = projection.to(product_dtype(device))

    def lost(*read: Tensor) -> Tensor:
        return _lost(heads, projection, *read)

    of_read: Callable[..., Tensor] = lost
    if device.type == "cuda":  # hundreds of short kernels are launched as one graph
        of_read = torch.compile(lost, dynamic=False, mode="reduce-overhead")
    return fit(
        heads.parameters(),
        lambda: of_read(*labels.of(next(drawn))),
        schedule,
        device,
        lambda: (validate().first, ""),
    )


def _lost(
    heads: DraftHeads, projection: Tensor,
    hidden: Tensor, tokens: Tensor, ahead: Tensor, chosen: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    """The mean cross-entropy of heads at n places: to the target's distribution behind each of the
    following tokens [n, num_depths], where the target's hidden rows are `ahead`, and to its choice.
    Those that do not count are 0."""
    loss = torch.zeros((), device=hidden.device)
    for depth, logits in enumerate(heads.logits(hidden.float(), tokens)):
        said = logits.float().log_softmax(-1)
        wanted = F.linear(ahead[:, depth].to(projection.dtype), projection).float().softmax(-1)
        soft = (wanted * said).sum(-1)
        hard = said.gather(1, chosen[:, depth, None])[:, 0]
        each = ((1 - CHOSEN) * soft + CHOSEN * hard) * counts[:, depth]
        loss = loss - DECAY**depth * each.mean()
    return loss


@torch.no_grad()
def measure(heads: DraftHeads, rows: HeadRows, start: int = 0) -> Accuracy:
    """Over the positions of rows from `start` on."""
    length = rows.tokens.shape[1] - heads.num_depths - 1
    hidden = rows.hidden[:, start:length].flatten(0, 1)
    tokens = rows.following(heads.num_depths)[:, start:].flatten(0, 1)
    best: list[list[Tensor]] = [[] for _ in range(heads.num_depths)]
    for part in torch.arange(len(hidden), device=hidden.device).split(AT_A_TIME):
        with mixed(hidden.device):
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
    random = torch.Generator(places.device).manual_seed(seed)
    while True:
        order = places[torch.randperm(len(places), generator=random, device=places.device)]
        yield from (part for part in order.split(batch) if len(part) == batch or len(order) < batch)

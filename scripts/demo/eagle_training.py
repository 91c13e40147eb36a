"""Training-time test of EAGLE-3: a head is unrolled over its own outputs while it is trained.

What a step puts out takes the place of the target's features in the next one, as it will when the
head drafts; the tokens are those of the text. So each step learns from the errors of those before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.eagle_head import EagleHead
from scripts.demo.head_rows import HeadRows
from scripts.demo.head_training import DECAY, Accuracy, accuracy_of
from scripts.demo.model import Llama
from scripts.demo.training import Schedule, fit, mixed

HARD_SHARE = 0.3  # of cross-entropy to the likeliest token, which greedy acceptance asks for


@dataclass(frozen=True, slots=True)
class EagleRows:
    """Rows of equal length, what a head reads of the target there, and what that chose."""

    text: HeadRows
    features: Tensor  # bfloat16 [rows, length, taps * hidden_size]

    @staticmethod
    def joined(parts: list[EagleRows]) -> EagleRows:
        """All rows of several."""
        text = HeadRows.joined([part.text for part in parts])
        return EagleRows(text, torch.cat([part.features for part in parts]))

    def __getitem__(self, at: Tensor) -> EagleRows:
        text = self.text
        return EagleRows(
            HeadRows(text.tokens[at], text.hidden[at], text.chosen[at]), self.features[at]
        )


@torch.no_grad()
def read_features(
    target: Llama, tokens: Tensor, taps: tuple[int, ...], batch: int = 16
) -> EagleRows:
    """Run the target over rows [rows, length] and keep what enters the layers `taps`."""
    device = target.model.norm.weight.device
    features, hidden, chosen = [], [], []
    for part in tokens.to(device).split(batch):
        with mixed(device):
            rotary = target.get_buffer("rotary")[:, : part.shape[1]]
            x = target.model.embed_tokens(part)
            entering = []
            for layer in target.model.layers:
                entering.append(x.bfloat16())
                x = layer(x, rotary)
            states = target.model.norm(x)
            logits = F.linear(states, target.model.embed_tokens.weight)
        features.append(torch.cat([entering[tap] for tap in taps], -1))
        hidden.append(states.bfloat16())
        chosen.append(logits.argmax(-1))
    text = HeadRows(tokens.to(device), torch.cat(hidden), torch.cat(chosen))
    return EagleRows(text, torch.cat(features))


def likeliest_tokens(rows: HeadRows, count: int, vocab_size: int) -> Tensor:
    """The `count` tokens that the target chooses most often, ascending."""
    found = torch.bincount(rows.chosen.flatten(), minlength=vocab_size)
    return found.topk(count).indices.sort().values


def train_eagle(
    head: EagleHead,
    rows: EagleRows,
    projection: Tensor,
    schedule: Schedule,
    batch: int,
    num_steps: int,
    validate: Callable[[], Accuracy],
    seed: int,
) -> list[tuple[int, list[float]]]:
    """Unroll `num_steps` steps over batches of rows; ten validations. projection: the target's
    output matrix."""
    device = projection.device
    kept = projection[head.kept]
    rank = torch.full((len(projection),), -1, device=device)
    rank[head.kept] = torch.arange(len(head.kept), device=device)
    drawn = _draw(len(rows.features), batch, seed)

    def loss_of() -> Tensor:
        return _loss(head, rows[next(drawn).to(device)], kept, rank, num_steps)

    def validated() -> tuple[list[float], str]:
        accuracy = validate()
        return accuracy.first, f", {accuracy.tokens_per_round:.2f} tokens a round,"

    return fit(head.parameters(), loss_of, schedule, device, validated)


def _loss(head: EagleHead, rows: EagleRows, kept: Tensor, rank: Tensor, num_steps: int) -> Tensor:
    """Step s of place i shall say what the target says behind token i + 1 + s: cross-entropy to its
    distribution over the head's vocabulary, where its likeliest token is in that."""
    text = rows.text
    length = text.tokens.shape[1] - num_steps - 1
    features = rows.features[:, :length].float()
    total = torch.zeros((), device=features.device)
    for step, out in enumerate(head.unroll(features, text.tokens[:, 1:-1], num_steps)):
        log_probs = head.logits(out).float().log_softmax(-1)
        best = rank[text.chosen[:, step + 1 :][:, :length]]
        counts = best >= 0
        wanted = F.linear(text.hidden[:, step + 1 :][:, :length].float(), kept).float()
        soft = -(wanted.softmax(-1) * log_probs).sum(-1)
        hard = -log_probs.gather(-1, best.clamp(min=0)[..., None])[..., 0]
        lost = (soft + HARD_SHARE * hard) * counts
        total = total + DECAY**step * lost.sum() / counts.numel()
    return total


@torch.no_grad()
def measure_eagle(
    head: EagleHead, rows: EagleRows, num_steps: int, start: int = 0, batch: int = 16
) -> Accuracy:
    """How often chains of `num_steps` drafts are right, over places of rows from `start` on."""
    length = rows.text.tokens.shape[1] - num_steps - 1
    tops: list[list[Tensor]] = [[] for _ in range(num_steps)]
    for at in torch.arange(len(rows.features)).split(batch):
        part = rows[at.to(rows.features.device)]
        with mixed(part.features.device):
            found = head.unroll(
                part.features[:, :length].float(), part.text.tokens[:, 1:-1], num_steps
            )
            for step, out in enumerate(found):
                best = head.logits(out[:, start:]).topk(10, -1).indices
                tops[step].append(head.kept[best])
    return accuracy_of([torch.cat(own) for own in tops], rows.text, start)


def _draw(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of rows without end, each row once in a pass."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=random)
        yield from (part for part in order.split(batch) if len(part) == batch or count < batch)

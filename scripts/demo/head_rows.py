"""What draft heads learn from: hidden rows of the target, and what it chose at each of them.

Heads draft what the target will choose, so only positions count at which the text is what the
target has chosen: all of its own greedy text, two thirds of other people's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.batches import TokenStream, with_bos
from scripts.demo.generation import generate
from scripts.demo.model import Llama

NUM_LIKELY = 32  # tokens of a distribution that are kept


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of equal length, each behind `<s>`."""

    tokens: Tensor  # int64 [rows, length]
    hidden: Tensor  # bfloat16 [rows, length, hidden_size], behind the final norm
    chosen: Tensor  # int64 [rows, length]: the target's likeliest token after each

    def depths(self, num_heads: int) -> list[tuple[Tensor, Tensor]]:
        """For each head (labels, where they count), [rows, length - num_heads - 1].

        Head m at position t shall say what the target chooses after t + 1 + m, if the text until
        there is what it chose: that is the path on which this draft would be verified.
        """
        length = self.tokens.shape[1] - num_heads - 1
        counts = torch.ones_like(self.tokens[:, :length], dtype=torch.bool)
        found = []
        for head in range(num_heads):
            own, text = self.chosen[:, head:], self.tokens[:, head + 1 :]
            counts = counts & (own[:, :length] == text[:, :length])
            found.append((self.chosen[:, head + 1 :][:, :length], counts))
        return found

    def following(self, num_heads: int) -> Tensor:
        """int64 [rows, length - num_heads - 1, num_heads]: the text after each position."""
        length = self.tokens.shape[1] - num_heads - 1
        return self.tokens[:, 1:].unfold(1, num_heads, 1)[:, :length]

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """All rows of several."""
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, slots=True)
class LikelyRows(HeadRows):
    """And the target's distribution after each token, as far as it is kept."""

    likely: Tensor  # int16 [rows, length, NUM_LIKELY]: the likeliest first
    probs: Tensor  # float16, of the same shape


@torch.no_grad()
def read_rows(target: Llama, tokens: Tensor, batch: int = 8) -> LikelyRows:
    """Run the target over rows [rows, length]; what is read stays on its device."""
    device = target.model.norm.weight.device
    parts = []
    for part in tokens.to(device).split(batch):
        with torch.autocast(device.type, torch.bfloat16):
            states = target.states(part)
            logits = F.linear(states, target.model.embed_tokens.weight)
        probs = logits.float().softmax(-1)
        most = probs.topk(min(NUM_LIKELY, probs.shape[-1]))
        likely, kept = most.indices.to(torch.int16), most.values.half()
        parts.append(LikelyRows(part, states.bfloat16(), logits.argmax(-1), likely, kept))
    return LikelyRows.joined(parts)


def corpus_rows(stream: TokenStream, num_rows: int, length: int, seed: int) -> Tensor:
    """Rows [num_rows, length] cut from random places, `<s>` included."""
    starts = np.random.default_rng(seed).integers(len(stream) - length, size=num_rows)
    return with_bos(torch.from_numpy(np.stack([stream[s : s + length - 1] for s in starts])))


class Amounts(Protocol):
    """What a recipe says of the text to learn from."""

    @property
    def corpus_rows(self) -> int: ...
    @property
    def greedy_rows(self) -> int: ...
    @property
    def sampled_rows(self) -> int: ...  # at temperature 0.8
    @property
    def length(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def rows_at_once(self) -> int: ...  # that the target writes


def training_texts(target: Llama, stream: TokenStream, amounts: Amounts, seed: int) -> list[Tensor]:
    """Rows that the target wrote after prompts of the corpus, and rows of the corpus."""
    parts = []
    heats = ((amounts.greedy_rows, 0.0), (amounts.sampled_rows, 0.8))
    for index, (count, heat) in enumerate(heats):
        if not count:
            continue
        prompts = corpus_rows(stream, count, amounts.prompt_length, seed + index)
        torch.manual_seed(seed)
        parts.append(written_rows(target, prompts, amounts.length, heat, amounts.rows_at_once))
    parts.append(corpus_rows(stream, amounts.corpus_rows, amounts.length, seed + 2))
    print(f"{sum(map(len, parts))} rows of {amounts.length} tokens", flush=True)
    return parts


@torch.no_grad()
def written_rows(
    target: Llama, prompts: Tensor, length: int, temperature: float, batch: int = 256
) -> Tensor:
    """Prompts [rows, n], continued by the target to [rows, length]."""
    device = target.model.norm.weight.device
    parts = []
    for part in prompts.to(device).split(batch):
        with torch.autocast(device.type, torch.bfloat16):
            more = generate(target, part, length - part.shape[1], temperature)
        parts.append(torch.cat([part, more], dim=1))
    return torch.cat(parts)

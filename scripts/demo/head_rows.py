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
from scripts.demo.training import mixed


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


@torch.no_grad()
def read_rows(target: Llama, tokens: Tensor, batch: int = 8) -> HeadRows:
    """Run the target over rows [rows, length]; what is read stays on its device."""
    device = target.model.norm.weight.device
    tokens = tokens.to(device)
    width = target.model.norm.weight.shape[0]
    hidden = torch.empty((*tokens.shape, width), dtype=torch.bfloat16, device=device)
    chosen = torch.empty_like(tokens)
    for part, own, best in zip(
        *(each.split(batch) for each in (tokens, hidden, chosen)), strict=True
    ):
        with mixed(device):
            states = target.states(part)
            logits = F.linear(states, target.model.embed_tokens.weight)
        own.copy_(states)
        best.copy_(logits.argmax(-1))
    return HeadRows(tokens, hidden, chosen)


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
    def invented_rows(self) -> int: ...  # greedy ones behind prompts that it sampled itself
    @property
    def length(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def rows_at_once(self) -> int: ...  # that the target writes


def training_texts(target: Llama, stream: TokenStream, amounts: Amounts, seed: int) -> list[Tensor]:
    """Rows that the target wrote after prompts of the corpus, which it knows by heart in part,
    rows after prompts that it wrote itself, and rows of the corpus."""
    parts = []
    heats = ((amounts.greedy_rows, 0.0), (amounts.sampled_rows, 0.8))
    for index, (count, heat) in enumerate(heats):
        if not count:
            continue
        prompts = corpus_rows(stream, count, amounts.prompt_length, seed + index)
        torch.manual_seed(seed)
        parts.append(written_rows(target, prompts, amounts.length, heat, amounts.rows_at_once))
    parts.append(corpus_rows(stream, amounts.corpus_rows, amounts.length, seed + 2))
    if amounts.invented_rows:
        begun = corpus_rows(stream, amounts.invented_rows, amounts.prompt_length // 4, seed + 3)
        prompts = written_rows(target, begun, amounts.prompt_length, 1.0, amounts.rows_at_once)
        parts.append(written_rows(target, prompts, amounts.length, 0.0, amounts.rows_at_once))
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
        with mixed(device):
            more = generate(target, part, length - part.shape[1], temperature)
        parts.append(torch.cat([part, more], dim=1))
    return torch.cat(parts)

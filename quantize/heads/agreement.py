"""How often heads say what the target chooses: their acceptance, measured without drafting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.quantize.heads.heads import HeadModule

if TYPE_CHECKING:
    import torch

ROWS_AT_A_TIME = 256  # whose logits are in memory
Batch = tuple[slice, "torch.Tensor", "torch.Tensor"]  # which positions of all, hidden, tokens


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target computed of rows of text."""

    tokens: torch.Tensor  # int64 [rows, length]
    hidden: torch.Tensor  # [rows, length, hidden_size], that heads read
    chosen: torch.Tensor  # int64 [rows, length]: its likeliest token after each

    def split(self, count: int) -> tuple[TargetRows, TargetRows]:
        """The first rows, and the others."""
        all_rows = (self.tokens, self.hidden, self.chosen)
        return TargetRows(*(t[:count] for t in all_rows)), TargetRows(
            *(t[count:] for t in all_rows)
        )

    def following(self, count: int) -> torch.Tensor:
        """int64 [rows, length - count, count]: the text behind each position that has so much."""
        return self.tokens[:, 1:].unfold(1, count, 1) if count else self.tokens[..., None][..., :0]

    def batches(self, length: int, count: int, *, whole: bool) -> Iterator[Batch]:
        """The first `length` positions of all rows and so many tokens behind each, as they are in
        memory together: a row of text at a time, or (not whole) a number of positions."""
        hidden = self.hidden[:, :length].flatten(0, 1)
        tokens = self.following(count)[:, :length].flatten(0, 1)
        size = length if whole else ROWS_AT_A_TIME
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            yield part, hidden[part], tokens[part]


def choose(hidden: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """The target's likeliest tokens after hidden [rows, length, hidden_size]."""
    import torch

    flat = torch.split(hidden.flatten(0, 1), ROWS_AT_A_TIME)
    found = [
        torch.nn.functional.linear(part.to(projection.device), projection).argmax(-1).cpu()
        for part in flat
    ]
    return torch.cat(found).view(hidden.shape[:2])


def agreement(
    module: HeadModule,
    rows: TargetRows,
    depths: int,
    num_tokens: int,
    device: torch.device,
    *,
    whole: bool = False,
) -> list[int]:
    """For each depth: at how many positions the likeliest token is the target's choice, of those
    that `count_positions` counts. The module reads so many tokens behind a position, and rows of
    text that are whole if it attends."""
    places = _places(rows, depths)
    right = [0] * depths
    length = places[0].shape[1]
    labels = [rows.chosen[:, m + 1 :][:, :length].flatten() for m in range(depths)]
    for part, hidden, tokens in rows.batches(length, num_tokens, whole=whole):
        for depth, said in enumerate(module(hidden.to(device), tokens.to(device))):
            hits = said.argmax(-1).cpu() == labels[depth][part]
            right[depth] += int((hits & places[depth].flatten()[part]).sum())
    return right


def count_positions(rows: TargetRows, depths: int) -> list[int]:
    """For each depth: the positions at which the text until there is what the target chose."""
    return [int(place.sum()) for place in _places(rows, depths)]


def _places(rows: TargetRows, depths: int) -> list[torch.Tensor]:
    """bool [rows, length - depths - 1] for each depth."""
    length = rows.tokens.shape[1] - depths - 1
    found: list[torch.Tensor] = []
    for depth in range(depths):
        same = rows.chosen[:, depth:][:, :length] == rows.tokens[:, depth + 1 :][:, :length]
        found.append(found[-1] & same if found else same)
    return found

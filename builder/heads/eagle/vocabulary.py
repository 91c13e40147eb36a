"""The reduced vocabulary of an EAGLE-3 head: which tokens of the target its logits are of.

    d2t [draft_vocab] offsets: row i of the output matrix is token i + d2t[i]
    t2d [vocab] bool: which tokens these are

Tokens are in ascending order. Files that hold the tokens themselves in d2t load as well, and would
draft nonsense; t2d tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.sources import TensorReader
from llmctl.errors import BadTensorShape, BadTensorValue, MissingTensor
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch

OFFSETS, KEPT = "d2t", "t2d"
_INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True)
class DraftIndex:
    """int32 [vocab]: the row of the output matrix of each token, -1 for one that has none."""

    name: str  # of d2t
    vocab_size: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def dtype(self) -> str:
        return "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocab_size,)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        tokens = _tokens(checkpoint.read(self.name))
        index = torch.full((self.vocab_size,), -1, dtype=torch.int32)
        index[tokens] = torch.arange(len(tokens), dtype=torch.int32)
        yield index


def check_vocabulary(
    where: Path,
    found: Mapping[str, TensorInfo],
    held: Mapping[str, torch.Tensor],
    vocab_size: int,
    draft_vocab_size: int,
) -> bool:
    """Whether the head has a reduced vocabulary. Reads the two maps, and no weights.

    Raises MissingTensor, BadTensorShape and BadTensorValue (tokens outside the target's vocabulary,
    maps that contradict each other).
    """
    absent = [name for name in (OFFSETS, KEPT) if name not in found]
    if draft_vocab_size == vocab_size and len(absent) == 2:
        return False
    if absent:
        raise MissingTensor(
            f"{where} lacks {' and '.join(absent)}; its vocabulary of {draft_vocab_size} tokens is "
            f"not the target's of {vocab_size}",
            fix="fetch the head again",
        )
    offsets, kept = found[OFFSETS], found[KEPT]
    is_sound = offsets.shape == (draft_vocab_size,) and offsets.dtype in _INTEGERS
    if not is_sound or kept.shape != (vocab_size,) or kept.dtype not in ("BOOL", "U8"):
        raise BadTensorShape(
            f"{OFFSETS} and {KEPT} in {where} are {offsets.dtype} {list(offsets.shape)} and "
            f"{kept.dtype} {list(kept.shape)}; integers [{draft_vocab_size}] and truth values "
            f"[{vocab_size}] are wanted",
            fix="fetch the head again",
        )
    file = Checkpoint(where.parent, {}, found, None, held)
    tokens = _tokens(file.read(OFFSETS))
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise BadTensorValue(
            f"{OFFSETS} in {where} leads to token {int(outside[0])}; the target has the tokens 0 "
            f"to {vocab_size - 1}",
            fix="use a head of this target whose d2t holds offsets, not token ids",
        )
    marked = file.read(KEPT).bool()
    is_ascending = bool((tokens[1:] > tokens[:-1]).all())
    if not is_ascending or not bool(marked[tokens].all()) or int(marked.sum()) != len(tokens):
        raise BadTensorValue(
            f"{OFFSETS} and {KEPT} in {where} are of different tokens: {OFFSETS} holds offsets, so "
            f"that i + {OFFSETS}[i] ascends through the {int(marked.sum())} tokens of {KEPT}",
            fix="use a head whose d2t holds offsets, not token ids",
        )
    return True


def _tokens(offsets: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(len(offsets), dtype=torch.int64) + offsets.to(torch.int64)

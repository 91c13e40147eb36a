"""Rows of token ids. Every row starts with `<s>`, wherever in a document its window begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.tokenizer import BOS_ID, EOS_ID

TokenStream = npt.NDArray[np.int32]


def encode_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenStream:
    """All texts after each other, each ended by `</s>`."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.concatenate([np.array([*item.ids, EOS_ID], dtype=np.int32) for item in encodings])


def epochs(stream: TokenStream, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [batch, length + 1]: `<s>` and `length` tokens; the inputs are the first
    `length` columns, the labels the last.

    Each pass cuts the stream at a new offset and visits the windows in a new order.
    """
    random = np.random.default_rng(seed)
    if len(stream) < length * (batch + 1):
        raise SystemExit(
            f"the corpus has {len(stream)} tokens; batches of {batch} rows of {length} need "
            f"{length * (batch + 1)}. Give a larger --corpus"
        )
    while True:
        offset = int(random.integers(length))
        num_rows = (len(stream) - offset) // length
        rows = stream[offset : offset + num_rows * length].reshape(num_rows, length)
        order = random.permutation(num_rows)
        for first in range(0, num_rows - batch + 1, batch):
            yield with_bos(torch.from_numpy(rows[order[first : first + batch]]))


def with_bos(rows: Tensor) -> Tensor:
    """Rows [batch, n] of int32 become [batch, n + 1] of int64 with `<s>` in front."""
    bos = torch.full((len(rows), 1), BOS_ID, dtype=torch.int64)
    return torch.cat([bos, rows.long()], dim=1)

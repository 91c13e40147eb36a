"""ReDrafter's arithmetic a second time, slowly and in other words: beam search over the whole
vocabulary, one beam at a time, and the published formulas of deduplication and of the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_softmax(logits: Array) -> Array:
    wide = logits - logits.max()
    return wide - np.log(np.exp(wide).sum())


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@dataclass
class NumpyHead:
    """A head in float64, row by row. tensors: by Apple's names."""

    recurrence: str
    tensors: dict[str, Array]
    embedding: Array

    def linear(self, name: str, x: Array) -> Array:
        bias = self.tensors.get(f"{name}.bias", 0.0)
        return np.asarray(self.tensors[f"{name}.weight"] @ x + bias)

    def state(self, token: int, state: Array | None) -> Array:
        e = self.embedding[token]
        if self.recurrence == "sum":
            return e if state is None else state + e
        if self.recurrence == "linear" and state is None:
            return self.linear("rnn_w", e)
        before = np.zeros_like(e) if state is None else state
        x = self.linear("rnn_w", e) + self.linear("rnn_u", before)
        return silu(x) if self.recurrence == "silu" else x

    def logits(self, hidden: Array, state: Array) -> Array:
        x = np.concatenate((hidden, state))
        if "input_proj.weight" in self.tensors:
            x = self.linear("input_proj", x)
        layer = 0
        while f"lm_head.{layer}.linear.weight" in self.tensors:
            x = x + silu(self.linear(f"lm_head.{layer}.linear", x))
            layer += 1
        return self.linear(f"lm_head.{layer}", x)


Expand = Callable[[Sequence[int]], Array]  # a path from the root -> logits of what follows


def expand_with(head: NumpyHead, hidden: Array) -> Expand:
    """The head's logits behind any path of one request, computed from its beginning."""

    def expand(path: Sequence[int]) -> Array:
        state = None
        for token in path:
            state = head.state(token, state)
        assert state is not None
        return head.logits(hidden, state)

    return expand


def slow_search(
    expand: Expand,
    root: int,
    length: int,
    num_beams: int,
    normalize: Callable[[Array], Array] = log_softmax,
) -> list[tuple[list[int], list[float], float]]:
    """The beams as (tokens with the root, their log-probs, score), by the whole vocabulary; those
    that are not there yet have the score -50000."""
    beams = [([root], list[float](), 0.0 if i == 0 else -50000.0) for i in range(num_beams)]
    for _ in range(length):
        offers = []
        for number, (path, log_probs, score) in enumerate(beams):
            for token, value in enumerate(normalize(expand(path))):
                offers.append((-(score + value), number, token, path, log_probs, float(value)))
        offers.sort(key=lambda offer: offer[:3])
        beams = [
            ([*path, token], [*log_probs, value], -negative)
            for negative, _, token, path, log_probs, value in offers[:num_beams]
        ]
    return beams


@dataclass
class Packed:
    """What deduplication gives, by the published matrix formulas. Index 0 is the root."""

    owner: NDArray[np.int64]  # [beams, length]: the smallest beam with the same beginning
    tokens: list[int]
    flat: list[int]  # beam * length + place of each
    unpacker: NDArray[np.int64]  # [beams, length]: the packed index of each
    depth: list[int]

    @property
    def parents(self) -> list[int]:
        """-1 for the root."""
        width = self.owner.shape[1]
        return [
            -1 if f % width == 0 else int(self.unpacker[f // width, f % width - 1])
            for f in self.flat
        ]

    def visible(self, index: int) -> set[int]:
        """What a row of the mask shows."""
        beam, place = divmod(self.flat[index], self.owner.shape[1])
        return set(self.unpacker[beam, : place + 1].tolist())


def pack(beams: NDArray[np.int64]) -> Packed:
    """beams [beams, length], the root included."""
    count, width = beams.shape
    match = beams[:, None, :] == beams[None, :, :]
    prefix = match.cumsum(axis=2) == np.arange(1, width + 1)
    owner = prefix.argmax(axis=1)  # the first that is true
    kept = owner == np.arange(count)[:, None]
    starts = np.concatenate(([0], kept.sum(axis=1).cumsum()[:-1]))
    segment = starts[owner]
    unpacker = np.array(
        [
            [seg[t] + sum(seg[s] == seg[t] for s in range(t)) for t in range(width)]
            for seg in segment
        ]
    )
    flat = np.flatnonzero(kept.ravel()).tolist()
    tokens = beams.ravel()[flat].tolist()
    return Packed(owner, tokens, flat, unpacker, [f % width for f in flat])


def trie(beams: NDArray[np.int64]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Every beginning of every beam (the root included) -> the beginning it follows."""
    return {
        tuple(beam[: place + 1]): tuple(beam[:place])
        for beam in beams.tolist()
        for place in range(len(beam))
    }


def choose(beams: NDArray[np.int64], targets: NDArray[np.int64]) -> tuple[int, int]:
    """The published greedy choice, (accepted, beam). beams [beams, length] with the root, targets
    of the same shape: what the target says behind each token."""
    matches = (beams[:, 1:] == targets[:, :-1]).astype(np.int64)
    accepted = matches.cumprod(axis=1).sum(axis=1)
    return int(accepted.max()), int(accepted.argmax())

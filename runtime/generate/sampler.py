"""The sampling parameters of a sequence's next tokens: seed, position, bans, counts.

Target and draft use the same rows, so a draft applies the request's own transforms.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from llmctl.errors import BadLogits
from llmctl.plugins.ops.sampling.spec import (
    TARGET_STREAM,
    SamplingBackend,
    SamplingRow,
    has_penalties,
)
from llmctl.runtime.generate.repetition import NgramBans
from llmctl.runtime.generate.stop import bad_word_reach, banned_next
from llmctl.runtime.request import Request, Sequence


class Sampler:
    """Sampling state of all running sequences, and the arithmetic that draws their tokens."""

    def __init__(self, vocab_size: int, backend: SamplingBackend) -> None:
        self.vocab_size = vocab_size
        self.backend = backend
        self._counts: dict[int, _Counts] = {}
        self._ngrams: dict[int, NgramBans] = {}

    def is_plain(self, sequence: Sequence) -> bool:
        """True when every token of this round is the argmax of the raw logits."""
        request = sequence.request
        params = request.sampling_config
        if not params.is_greedy or not is_by_logits(request):
            return False
        return sequence.num_new_tokens >= params.min_tokens or not request.end_ids

    def row(
        self, sequence: Sequence, path: Tokens[int] = (), stream: int = TARGET_STREAM
    ) -> SamplingRow:
        """The row that draws the token after sequence.tokens + path."""
        request = sequence.request
        params = request.sampling_config
        reach = bad_word_reach(request)
        banned: tuple[int, ...] = ()
        if params.no_repeat_ngram_size:
            ngrams = self._ngrams.get(sequence.sequence_id)
            if ngrams is None:
                ngrams = NgramBans(params.no_repeat_ngram_size)
                self._ngrams[sequence.sequence_id] = ngrams
            banned = ngrams.after(sequence.tokens, path)
        begin = max(0, len(sequence.tokens) - reach)  # the longest word may be longer than they
        tail = (*sequence.tokens[begin:], *path) if reach else ()
        return SamplingRow(
            params=params,
            seed=sequence.seed,
            position=len(sequence.tokens) + len(path),
            counts=self._count(sequence, path) if has_penalties(params) else None,
            banned=banned + banned_next(request, tail, sequence.num_new_tokens + len(path)),
            stream=stream,
        )

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._counts.pop(sequence.sequence_id, None)
        self._ngrams.pop(sequence.sequence_id, None)

    def _count(self, sequence: Sequence, path: Tokens[int]) -> NDArray[np.int32]:
        """Occurrences of each id in the committed tokens and the path."""
        counts = self._counts.setdefault(sequence.sequence_id, _Counts(self.vocab_size))
        return counts.upto(sequence.tokens, path)


def bad_logits(role: str, tokens: list[int]) -> BadLogits:
    """The error of these rows' sequence. tokens: what was drawn in them, negative where a row
    contained NaN, or +inf where a token is drawn."""
    return BadLogits(
        f"the {role} engine computed NaN or infinite logits in "
        f"{sum(token < 0 for token in tokens)} of {len(tokens)} rows",
        fix="build the engine again; with float16, try --dtype bfloat16 or float32",
    )


def is_by_logits(request: Request) -> bool:
    """True if a token depends only on its logits, seed and position, and not on earlier tokens of
    the sequence (except through min_tokens), nor on drafts."""
    params = request.sampling_config
    if params.accepts_typical:
        return False
    return not (request.bad_words or has_penalties(params) or params.no_repeat_ngram_size)


class _Counts:
    """Token counts that follow a growing list; committed tokens are never taken back."""

    __slots__ = ("_committed", "_num_counted")

    def __init__(self, vocab_size: int) -> None:
        self._committed = np.zeros(vocab_size, np.int32)
        self._num_counted = 0

    def upto(self, tokens: list[int], path: Tokens[int]) -> NDArray[np.int32]:
        np.add.at(self._committed, tokens[self._num_counted :], 1)
        self._num_counted = len(tokens)
        if not path:
            return self._committed
        counts = self._committed.copy()
        np.add.at(counts, list(path), 1)
        return counts

"""Prompt lookup: propose what followed the last tokens when they occurred before.

The longest suffix of up to `max_ngram` tokens that occurred earlier is used; of several
occurrences, the latest. The copy may continue into the tokens it proposes itself, so a short period
("abab") continues at full length.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence


class NgramDrafter(WithoutWindow):
    """Drafts from each sequence's own tokens. No engine, no KV."""

    holders: Mapping[str, BlockHolder] = MappingProxyType({})

    def __init__(self, max_draft_len: int, max_ngram: int = 3) -> None:
        for name, value in (("max_draft_len", max_draft_len), ("max_ngram", max_ngram)):
            if value < 1:
                raise BadConfig(f"{name} is {value}; it must be at least 1")
        self.max_draft_len = max_draft_len
        self.max_ngram = max_ngram
        self._indexes: dict[int, _NgramIndex] = {}

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare: a copy is a one-hot proposal, accepted by tokens."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Copies from the sequence's tokens; empty if the last token never occurred before."""
        return [
            Drafts(self._index(item.sequence).lookup(min(item.draft_len, self.max_draft_len)))
            for item in batch.generation
        ]

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Nothing to do: indexes are extended with committed tokens at the next lookup."""

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's index."""
        self._indexes.pop(sequence.sequence_id, None)

    def _index(self, sequence: Sequence) -> _NgramIndex:
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = _NgramIndex(sequence.tokens, self.max_ngram)
            self._indexes[sequence.sequence_id] = index
        return index


class _NgramIndex:
    """For each n-gram of a growing token list, where its latest occurrence ended.

    Only n-grams that end before the last token are entered, so a hit always has a continuation.
    Each token costs max_ngram insertions, once.
    """

    __slots__ = ("_after", "_max_ngram", "_next_end", "_tokens")

    def __init__(self, tokens: list[int], max_ngram: int) -> None:
        self._tokens = tokens
        self._max_ngram = max_ngram
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self._next_end = 1

    def lookup(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that may follow; [] without a match."""
        tokens, after = self._tokens, self._after
        count = len(tokens)
        for end in range(self._next_end, count):
            for size in range(1, min(self._max_ngram, end) + 1):
                after[tuple(tokens[end - size : end])] = end
        self._next_end = max(count, 1)
        if num_tokens < 1:
            return []
        for size in range(min(self._max_ngram, count - 1), 0, -1):
            source = after.get(tuple(tokens[count - size :]))
            if source is not None:
                copied = tokens[source : source + num_tokens]
                period = count - source
                # the copy continues with the tokens it has just copied
                while len(copied) < num_tokens:
                    copied.append(copied[len(copied) - period])
                return copied
        return []

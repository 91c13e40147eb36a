"""N-grams that were seen, by the token that they follow."""

from __future__ import annotations

from collections.abc import Sequence

Ngram = tuple[int, ...]  # the N - 1 tokens behind the first

ROWS = 2048  # a power of two
MOST_READ = 4096  # tokens: of a longer text, its last ones are read


class NgramPool:
    """Up to `most` n-grams behind each token, the oldest forgotten first.

    A table of ROWS rows. A token's row is its id modulo ROWS, and a token that comes to the row of
    another one takes it over. So its memory is bounded, and a device can keep the same table.
    """

    __slots__ = ("_ngram_size", "_next", "most", "rows")

    def __init__(self, ngram_size: int, most: int) -> None:
        self.most = most
        self._ngram_size = ngram_size
        self.rows: dict[int, tuple[int, list[Ngram]]] = {}  # whose, and its n-grams
        self._next = 0  # where the first n-gram begins that was not read

    def after(self, token: int) -> Sequence[Ngram]:
        """What followed a token, the newest last."""
        owner, ngrams = self.rows.get(token % ROWS, (token, []))
        return ngrams if owner == token else []

    def add(self, token: int, ngram: Ngram) -> None:
        """`ngram` followed `token`. One that is there becomes the newest."""
        if not self.most:
            return
        owner, ngrams = self.rows.get(token % ROWS, (token, []))
        if owner != token:
            ngrams = []
        if ngram in ngrams:
            ngrams.remove(ngram)
        elif len(ngrams) == self.most:
            del ngrams[0]
        ngrams.append(ngram)
        self.rows[token % ROWS] = token, ngrams

    def read(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of a text that has grown since."""
        size = self._ngram_size
        for start in range(max(self._next, len(tokens) - MOST_READ), len(tokens) - size + 1):
            self.add(tokens[start], tuple(tokens[start + 1 : start + size]))
        self._next = max(self._next, len(tokens) - size + 1)

"""Which tokens would repeat an n-gram of a sequence: `SamplingConfig.no_repeat_ngram_size`."""

from __future__ import annotations

from collections.abc import Sequence as Tokens


class NgramBans:
    """The n-grams of one sequence, including its prompt, indexed by all but their last token. It
    follows a list that only grows; drafts on a path are counted but not stored."""

    __slots__ = ("_followers", "_num_seen", "_size")

    def __init__(self, size: int) -> None:
        self._size = size  # at least 1; 1: no token occurs twice
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._num_seen = 0

    def after(self, tokens: list[int], path: Tokens[int] = ()) -> tuple[int, ...]:
        """Ids that must not follow tokens + path, in ascending order."""
        before = self._size - 1  # tokens of an n-gram that come before its last
        for end in range(max(self._num_seen, before), len(tokens)):
            prefix = tuple(tokens[end - before : end])
            self._followers.setdefault(prefix, set()).add(tokens[end])
        self._num_seen = len(tokens)
        tail = (*tokens[max(0, len(tokens) - before) :], *path)
        if len(tail) < before:
            return ()
        last = tail[len(tail) - before :]
        banned = set(self._followers.get(last, ()))
        for end in range(before, len(tail)):  # n-grams that end on the path
            if tail[end - before : end] == last:
                banned.add(tail[end])
        return tuple(sorted(banned))

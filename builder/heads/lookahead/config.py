"""The three sizes of lookahead decoding, under TensorRT-LLM's names."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from llmctl.errors import BadConfig

OPTION = "--lookahead-config"
FORM = "[window,ngram,verification], such as [7,5,7]"
MOST_DRAFTS = 1024  # nodes that the target verifies in a round


@dataclass(frozen=True, slots=True)
class LookaheadDecodingConfig:
    """W columns of a window in which tokens are guessed, N tokens of an n-gram (the one that it
    follows counts), and the G n-grams that are verified in a round. Raises BadConfig."""

    window_size: int = 4
    ngram_size: int = 3
    verification_set_size: int = 4

    def __post_init__(self) -> None:
        least = {"window_size": 1, "ngram_size": 1, "verification_set_size": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise BadConfig(f"{name} is {value!r}; it must be an integer >= {smallest}")
        if self.ngram_size == 1 and self.sizes != (1, 1, 0):
            raise BadConfig(
                f"ngram_size is 1, which drafts nothing, and window_size and verification_set_size "
                f"are {self.window_size} and {self.verification_set_size}",
                fix="[1,1,0] for no drafts, or an ngram_size of at least 2",
            )
        if self.max_draft_len > MOST_DRAFTS:
            raise BadConfig(
                f"[{self}] is {self.max_draft_len} drafts per round; at most {MOST_DRAFTS} are "
                "verified",
                fix="a smaller window, n-gram or verification set",
            )

    @staticmethod
    def parse(text: str) -> LookaheadDecodingConfig:
        """The sizes of --lookahead-config, as run.py takes them. Raises BadConfig."""
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        return LookaheadDecodingConfig.of(text if value is None else value, OPTION)

    @staticmethod
    def of(value: object, name: str) -> LookaheadDecodingConfig:
        """The sizes of a list that may hold anything and is called `name`. Raises BadConfig."""
        if not isinstance(value, list) or len(value) != 3:
            raise BadConfig(f"{name} is {value!r:.60}; it must have the form {FORM}")
        try:
            return LookaheadDecodingConfig(*value)
        except BadConfig as error:
            raise BadConfig(f"{name} is {value!r:.60}: {error}", fix=error.fix) from error

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(W, N, G)."""
        return self.window_size, self.ngram_size, self.verification_set_size

    @property
    def max_draft_len(self) -> int:
        """The most drafts of a round, without the root: TensorRT-LLM's count."""
        window, ngram, guesses = self.sizes
        return max(ngram - 2, 0) + (window - 1 + guesses) * (ngram - 1)

    def has_room_for(self, other: LookaheadDecodingConfig) -> bool:
        """Whether no size of the other is larger."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return all(theirs <= own for own, theirs in pairs)

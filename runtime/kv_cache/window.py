"""Which blocks a sequence still needs when no layer sees further back than a window.

Blocks before the window are given back as a sequence grows, so it holds a ring of blocks however
long it gets: the first tokens (sinks), then the window, then what the step computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmctl.errors import BadConfig

# Kernels read whole tiles of keys at multiples of this and mask what is not visible: 64 on a GPU,
# 32 on a CPU. So nothing is dropped that shares a tile with a visible token.
KEY_TILE = 64
# How far a cache group may lag behind and still find its whole window; beyond, it reads less.
GROUP_LAG = 64


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Every layer of every engine sees at most `size` tokens: the first `sink_tokens`, and the last
    ones of the others."""

    size: int
    sink_tokens: int = 0
    key_tile: int = KEY_TILE
    group_lag: int = GROUP_LAG

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadConfig(f"an attention window of {self.size} tokens; at least 1 is wanted")
        if not 0 <= self.sink_tokens < self.size:
            raise BadConfig(
                f"sink_token_length is {self.sink_tokens}; it must be at least 0 and less than "
                f"the attention window of {self.size} tokens"
            )

    @property
    def sink_end(self) -> int:
        """The first position that may ever be dropped."""
        return -(-self.sink_tokens // self.key_tile) * self.key_tile

    def oldest(self, position: int) -> int:
        """The oldest position, sinks aside, that any query from `position` on reads."""
        return (
            max(0, position + 1 - (self.size - self.sink_tokens)) // self.key_tile * self.key_tile
        )

    def most_blocks(self, step_tokens: int, tokens_per_block: int) -> int:
        """Blocks that a sequence holds at most while steps compute up to `step_tokens` of it."""
        reach = self.size - self.sink_tokens + self.key_tile + self.group_lag + step_tokens
        return -(-reach // tokens_per_block) + 1 + -(-self.sink_end // tokens_per_block)


def most_step_tokens(max_num_tokens: int, max_draft_len: int) -> int:
    """Tokens of one sequence that a step computes, or two rounds in flight, at most."""
    return max(max_num_tokens, 2 * max_draft_len + 3)


def common_window(windows: Iterable[Iterable[int]], sink_tokens: int = 0) -> AttentionWindow | None:
    """The window that holds for every layer of every engine, given theirs (0: full attention).

    None if any layer has full attention: then nothing can be dropped.
    """
    sizes = [size for engine in windows for size in engine]
    if not sizes or not all(sizes):
        return None
    return AttentionWindow(max(sizes), sink_tokens)

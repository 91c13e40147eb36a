"""How long the KV blocks of a request are worth keeping when no sequence uses them.

Among unused blocks the lowest priority is evicted first, and within a priority the least recently
used. A retention with a duration falls back to the default priority when its time, counted from the
end of the last use, is over. Names are those of the TensorRT-LLM executor in snake_case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmctl.errors import BadConfig
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types

MIN_PRIORITY = 0  # evicted first
MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35  # TensorRT-LLM's


class Retention(NamedTuple):
    """The retention that a request sets for one block."""

    priority: int
    duration_ms: float | None = None  # None: for ever


@refused.refuses()
@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Retention of the blocks that begin in prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None = None  # None: to the end of the prompt
    priority: int = DEFAULT_PRIORITY
    duration_ms: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.token_start < 0:
            raise BadConfig(f"token_start is {self.token_start}; it must be at least 0")
        if self.token_end is not None and self.token_end <= self.token_start:
            raise BadConfig(
                f"token_end is {self.token_end}; it must be greater than token_start "
                f"{self.token_start}"
            )
        _check("priority", self.priority, "duration_ms", self.duration_ms)


@refused.refuses()
@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Retention of a request's blocks: for ranges of its prompt, and for its output.

    A block belongs to the range that contains its first token; a block in no range, and any block
    of a request without this configuration, keeps its current retention (initially the default
    priority).
    """

    token_range_retention_configs: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _check(
            "decode_retention_priority",
            self.decode_retention_priority,
            "decode_duration_ms",
            self.decode_duration_ms,
        )
        ranges = sorted(self.token_range_retention_configs, key=lambda item: item.token_start)
        for first, second in zip(ranges, ranges[1:], strict=False):
            if first.token_end is None or first.token_end > second.token_start:
                end = "the end" if first.token_end is None else first.token_end
                raise BadConfig(
                    f"the token ranges [{first.token_start}, {end}) and "
                    f"[{second.token_start}, ...) overlap"
                )

    def of_block(self, first_token: int, num_prompt_tokens: int) -> Retention | None:
        """The retention of the block that begins at position `first_token`; None: not set."""
        if first_token >= num_prompt_tokens:
            return Retention(self.decode_retention_priority, self.decode_duration_ms)
        for item in self.token_range_retention_configs:
            is_before_end = item.token_end is None or first_token < item.token_end
            if item.token_start <= first_token and is_before_end:
                return Retention(item.priority, item.duration_ms)
        return None


def _check(
    priority_name: str, priority: int, duration_name: str, duration_ms: float | None
) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadConfig(
            f"{priority_name} is {priority}; it must be from {MIN_PRIORITY} to {MAX_PRIORITY}"
        )
    if duration_ms is not None and not duration_ms > 0:
        raise BadConfig(f"{duration_name} is {duration_ms}; it must be greater than 0")

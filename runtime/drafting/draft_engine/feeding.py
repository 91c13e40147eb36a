"""Splits what a draft engine has to read into calls within its limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmctl.runtime.step import Span


def cut(spans: Iterable[Span], max_num_tokens: int, max_batch_size: int) -> Iterator[list[Span]]:
    """The spans, in order, in calls of at most so many tokens and sequences. If a span is split,
    only its last part needs logits."""
    call: list[Span] = []
    room = max_num_tokens
    for span in spans:
        start = span.start
        while start < span.end:
            if room == 0 or len(call) == max_batch_size:
                yield call
                call, room = [], max_num_tokens
            end = min(span.end, start + room)
            needs_logits = span.needs_logits and end == span.end
            call.append(Span(span.sequence, start, end, (), needs_logits))
            room -= end - start
            start = end
    if call:
        yield call

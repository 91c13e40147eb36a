"""What a draft engine has to read, in calls within its limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.request import Sequence
from llmctl.runtime.step import Span, StepRunner


def unread(draft: StepRunner, sequence: Sequence, end: int, *, needs_logits: bool = False) -> Span:
    """tokens[:end] of a sequence as far as a draft engine has not read them."""
    ends = sequence.context_end if draft.context_group else 0
    start = sequence.kv_lens[DRAFT_GROUP]
    return Span(sequence, start, end, needs_logits=needs_logits, context_end=ends)


def cut(spans: Iterable[Span], draft: StepRunner) -> Iterator[list[Span]]:
    """The spans, in order, in calls of at most as many tokens and sequences as the engine takes. If
    a span is split, only its last part needs logits. Parts that are no whole group have 16-bit
    products, whatever the target computes there: other bits of a draft change no text."""
    call: list[Span] = []
    room, most = draft.max_num_tokens, draft.max_batch_size
    for span in spans:
        start = span.start
        while start < span.end:
            if room == 0 or len(call) == most:
                yield call
                call, room = [], draft.max_num_tokens
            end = min(span.end, start + room)
            needs_logits = span.needs_logits and end == span.end
            ends = span.context_end if end - start >= draft.context_group else 0
            call.append(
                Span(span.sequence, start, end, needs_logits=needs_logits, context_end=ends)
            )
            room -= end - start
            start = end
    if call:
        yield call

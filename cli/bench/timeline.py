"""One request from its submission on: when its tokens came, and what the engines did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmctl.cli.bench.metrics import e2e_ms
from llmctl.cli.bench.records import Recording, RequestRecord, StepRecord
from llmctl.cli.bench.svg import (
    BOTTOM,
    TOP,
    WIDE,
    Frame,
    chart,
    nice_ticks,
    short,
    text,
    whole_ticks,
)

HEIGHT = 260
LANE = 26  # pixels of the lane below the tokens
MOST_RESPONSES = 48  # shown; the rest of a long output looks the same


def typical_request(recording: Recording) -> RequestRecord | None:
    """The request with the median end to end time."""
    done = sorted(recording.done, key=e2e_ms)
    return done[len(done) // 2] if done else None


def timeline(request: RequestRecord, recording: Recording) -> str:
    """Bars of the tokens of every response over time, above the steps in which it ran."""
    assert request.submit_s is not None
    submit_s = request.submit_s
    shown = request.arrivals[:MOST_RESPONSES]
    last_ms = (shown[-1].at_s - submit_s) * 1e3
    most = max(arrival.num_tokens for arrival in shown)
    ticks = whole_ticks(most)
    frame = Frame(0, last_ms * 1.005, 0, max(ticks[-1], most * 1.1), HEIGHT, WIDE)
    upper = Frame(frame.x0, frame.x1, 0, frame.y1, HEIGHT - LANE - 6, WIDE)
    parts = [*upper.grid(ticks), upper.across(upper.y(0), "axis")]
    half = last_ms * 0.002  # of a bar's width
    for arrival in shown:
        at_ms = (arrival.at_s - submit_s) * 1e3
        hint = f"{arrival.num_tokens} tokens at {at_ms:.2f} ms"
        rows = (upper.y(arrival.num_tokens), upper.y(0))
        parts.append(upper.box("bar", (at_ms - half, at_ms + half), rows, hint))
    first_ms = (shown[0].at_s - submit_s) * 1e3
    parts += [
        frame.down(first_ms, "mark"),
        text(frame.x(first_ms) + 4, TOP + 8, "first token", "start", "value"),
    ]
    parts += _lane(frame, _steps(request, recording, shown[-1].at_s), submit_s)
    parts += frame.below([(t, short(t)) for t in nice_ticks(0, last_ms, 8) if t <= frame.x1])
    parts += frame.titles("ms since submission", "tokens a response")
    return chart(frame, parts, f"timeline of request {request.index}")


def _steps(request: RequestRecord, recording: Recording, until_s: float) -> list[StepRecord]:
    """Steps that read the request's prompt, as far as can be told, and those of its rounds."""
    assert request.submit_s is not None
    first_s = request.arrivals[0].at_s
    found = []
    for step in recording.steps:
        if step.iteration != request.iteration or step.end_s > until_s + 0.01:
            continue
        is_prompt = bool(step.context_requests) and request.submit_s <= step.end_s <= first_s
        if is_prompt or any(item.request == request.index for item in step.rounds):
            found.append(step)
    return found


def _lane(frame: Frame, steps: Sequence[StepRecord], submit_s: float) -> Iterator[str]:
    top = HEIGHT - BOTTOM - LANE
    for step in steps:
        end_ms = (step.end_s - submit_s) * 1e3
        start_ms = end_ms - max(step.step_ms, step.draft_ms + step.verify_ms)
        if step.context_requests:
            pieces = [("prompt", step.step_ms)]
        else:
            pieces = [("draft", step.draft_ms), ("verify", step.verify_ms)]
        at_ms = max(0.0, start_ms)
        for name, length_ms in pieces:
            until_ms = min(at_ms + length_ms, frame.x1)
            if until_ms > at_ms:
                hint = f"{name} {length_ms:.3f} ms"
                yield frame.box(name, (at_ms, until_ms), (top, top + LANE - 4), hint)
            at_ms = until_ms

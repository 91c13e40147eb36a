"""The run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Per way of running: a track of steps, one of drafting and verification inside them, one line per
request from submission to its last token, and counters of requests, KV blocks and step sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmctl.cli.bench.records import Recording, RequestRecord, StepRecord
from llmctl.cli.bench.session import Measured
from llmctl.cli.bench.synthetic import NOTICE

STEPS, PARTS = 1, 2  # tracks
GAP_S = 0.001  # between iterations, which all begin at 0
Event = dict[str, Any]


def trace_json(measured: Measured) -> dict[str, Any]:
    """The whole trace."""
    events = [
        event
        for number, way in enumerate(measured.ways, start=1)
        for event in _way_events(number, way.name, way.recording)
    ]
    other: dict[str, Any] = {"is_partial": measured.is_partial}
    if measured.forced is not None:
        other["synthetic_acceptance"] = NOTICE
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _way_events(pid: int, name: str, recording: Recording) -> Iterator[Event]:
    for track, title in ((None, name), (STEPS, "steps"), (PARTS, "draft and verify")):
        kind = "process_name" if track is None else "thread_name"
        yield {"ph": "M", "pid": pid, "tid": track or 0, "name": kind, "args": {"name": title}}
    begins = _begins(recording)
    busy_us = 0.0
    for step in recording.steps:
        end_us = (begins[step.iteration] + step.end_s) * 1e6
        start_us = max(0.0, end_us - step.step_ms * 1e3)
        yield _slice(pid, STEPS, _step_name(step), start_us, end_us, _step_args(step))
        at_us = start_us
        if step.draft_ms + step.verify_ms > step.step_ms:  # the device began before the host
            at_us = end_us - (step.draft_ms + step.verify_ms) * 1e3
        at_us = max(at_us, busy_us)
        for part, length_ms in (("draft", step.draft_ms), ("verify", step.verify_ms)):
            until_us = min(at_us + length_ms * 1e3, end_us)
            if until_us > at_us and (part == "verify" or _has_drafts(step)):
                yield _slice(pid, PARTS, part, at_us, until_us, {})
                at_us = until_us
        busy_us = at_us
        for counter, values in _counters(step).items():
            yield {"ph": "C", "pid": pid, "name": counter, "ts": end_us, "args": values}
    for request in recording.requests:
        yield from _request_events(pid, request, begins[request.iteration])


def _begins(recording: Recording) -> list[float]:
    """Where each iteration begins on a common line, seconds."""
    begins = [0.0]
    for number in range(recording.num_iterations - 1):
        ends = [item.end_s for item in recording.steps if item.iteration == number]
        begins.append(begins[-1] + max(ends, default=0.0) + GAP_S)
    return begins


def _slice(
    pid: int, track: int, name: str, start_us: float, end_us: float, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": track,
        "name": name,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
    }


def _step_name(step: StepRecord) -> str:
    if not step.context_requests:
        return "generation"
    return "prompts and generation" if step.rounds else "prompts"


def _has_drafts(step: StepRecord) -> bool:
    return any(item.draft_tokens for item in step.rounds)


def _step_args(step: StepRecord) -> dict[str, Any]:
    return {
        "prompt tokens": step.context_tokens,
        "requests in generation": len(step.rounds),
        "draft tokens": sum(item.draft_tokens for item in step.rounds),
        "accepted tokens": sum(item.accepted_tokens for item in step.rounds),
        "new tokens": sum(item.tokens for item in step.rounds),
        "draft ms": step.draft_ms,
        "verify ms": step.verify_ms,
    }


def _counters(step: StepRecord) -> dict[str, dict[str, float]]:
    return {
        "requests": {"active": step.active_requests, "queued": step.queued_requests},
        "KV blocks": {"used": step.kv_used_blocks},
        "tokens a step": {"tokens": step.num_tokens},
    }


def _request_events(pid: int, request: RequestRecord, begin_s: float) -> Iterator[Event]:
    """Nested asynchronous slices: the request, and within it the wait for its first token."""
    if request.submit_s is None:
        return
    times = [request.submit_s, *(arrival.at_s for arrival in request.arrivals)]
    common = {
        "cat": "request",
        "id": f"{pid}.{request.iteration}.{request.index}",
        "pid": pid,
        "tid": 0,
    }
    name = f"request {request.index}"

    def at(kind: str, label: str, time_s: float, **args: object) -> Event:
        moment = {"ph": kind, "name": label, "ts": (begin_s + time_s) * 1e6}
        return {**common, **moment, "args": args}

    yield at("b", name, times[0], **{"input tokens": request.input_tokens})
    if request.arrivals:
        yield at("b", "to first token", times[0])
        yield at("e", "to first token", times[1])
        for arrival in request.arrivals:
            yield at("n", f"{arrival.num_tokens} tokens", arrival.at_s)
    yield at("e", name, times[-1], **{"output tokens": len(request.output_ids)})

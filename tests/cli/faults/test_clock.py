"""The system's clock may be set while a command runs: no duration, limit or order comes from it."""

from __future__ import annotations

import itertools
import json

import pytest

from llmctl.runtime.stats import recorder


@pytest.fixture
def clock_that_jumps_back(monkeypatch):
    """time.time, an hour earlier at every call."""
    hours = itertools.count()

    def jump() -> float:
        return 1.9e9 - 3600 * next(hours)

    monkeypatch.setattr("time.time", jump)
    monkeypatch.setattr(recorder, "time", jump)
    return hours


def test_times_of_a_benchmark_are_in_order(clock_that_jumps_back, bench, drafted, tmp_path):
    raw, trace = tmp_path / "raw", tmp_path / "trace"
    files = ["--raw", raw, "--trace", trace, "--report", tmp_path / "page.html"]
    load = ["--num-requests", 4, "--target-output-len", 12, "--request-rate", 200, *drafted]
    report, _ = bench("throughput", *load, *files)
    assert next(clock_that_jumps_back) > 10  # it was asked, for the times of day
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    requests = [row for row in rows if row["kind"] == "request"]
    ends = [step["end_s"] for step in steps]
    assert ends == sorted(ends) and ends[0] > 0 and ends[-1] < 60
    first = min(request["arrivals"][0][0] for request in requests)
    assert abs(ends[0] - first) < 60  # one clock for both; another is an hour off, or more
    for request in requests:
        times = [request["submit_s"], *(at_s for at_s, _ in request["arrivals"])]
        assert times == sorted(times)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "ts" in event]
    assert events and all(0 <= event["ts"] < 60e6 for event in events)
    assert 0 < report["performance"]["total_latency_ms"] < 60e3


def test_a_build_and_a_quantization_last_no_less_than_nothing(
    clock_that_jumps_back, llmctl, build_words, tmp_path
):
    done = llmctl(*build_words(tmp_path / "engine"), "--json")
    assert 0 < json.loads(done.out)["seconds_s"] < 60

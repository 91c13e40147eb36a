"""The benchmark's driver against a server of fakes: arrivals, failures, an end half-way."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from llmctl.cli.bench.driver import Driver, Pace
from llmctl.cli.bench.metrics import compute, histogram, percentiles
from llmctl.cli.bench.records import Recording
from llmctl.cli.bench.table import banner
from llmctl.cli.signals import Interrupted, Terminated
from llmctl.errors import BadLogits, RequestError
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response, Result


class Server:
    """Answers every request at once with its number of tokens, in two responses; `script` turns
    the answer to a request (by index) into something else."""

    def __init__(self, script=None) -> None:
        self.script = script or {}
        self.ready: list[Response] = []
        self.most = self.num_open = self.num_requests = 0
        self.is_closed = False

    def enqueue_requests(self, requests):
        ids = []
        for request in requests:
            index = self.num_requests
            self.num_requests += 1
            self.num_open += 1
            ids.append(index + 100)
            answer = self.script.get(index, self.answer)
            self.ready += answer(index + 100, request)
        self.most = max(self.most, self.num_open)
        return ids

    def answer(self, request_id, request):
        return [
            Response(request_id, result=Result(0, (7,), False, False, FinishReason.NOT_FINISHED)),
            Response(
                request_id,
                result=Result(0, (8,) * (request.max_tokens - 1), True, True, FinishReason.LENGTH),
            ),
        ]

    def await_responses(self, request_id=None, timeout_s=None):
        if self.is_closed:
            return []
        taken, self.ready = self.ready, []
        self.num_open -= sum(r.result is None or r.result.is_final for r in taken)
        return taken

    def get_latest_iteration_stats(self):
        return []


def requests(count: int, tokens: int = 5) -> list[Request]:
    return [Request((1, 2, 3), tokens, streaming=True) for _ in range(count)]


def run(server, count=6, pace=None) -> Recording:
    recording = Recording()
    Driver(server).run(requests(count), pace or Pace(), recording)
    return recording


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_no_more_requests_than_allowed_are_in_flight(concurrency):
    server = Server()
    recording = run(server, pace=Pace(concurrency))
    assert server.most == (concurrency or 6)
    assert all(item.is_done and item.output_ids == [7, 8, 8, 8, 8] for item in recording.requests)


def test_requests_are_not_submitted_before_they_are_due():
    recording = run(Server(), 20, Pace(request_rate=500.0, seed=3))
    assert [item.due_s for item in recording.requests] == Pace(None, 500.0, 3).due_times_s(20)
    assert all(item.submit_s >= item.due_s for item in recording.requests)


def test_a_failed_request_is_counted_and_leaves_the_others_alone():
    fail = {2: lambda number, request: [Response(number, error=BadLogits("NaN"))]}
    recording = run(Server(fail))
    report = compute(recording, 0)
    assert report["request_info"]["num_failed"] == 1
    assert report["request_info"]["num_finished"] == 5
    assert recording.requests[2].error == "BadLogits: NaN"
    assert report["request_info"]["failures"] == {"BadLogits: NaN": 1}
    marks = {"request_info": report["request_info"], "synthetic_acceptance": None}
    assert list(banner(marks | {"is_partial": False})) == [
        "1 of 6 requests FAILED",
        "1 of them with BadLogits: NaN",
    ]


def test_an_output_that_was_cut_short_is_not_finished():
    final = Result(0, (), True, True, FinishReason.CANCELLED)
    recording = run(Server({0: lambda number, request: [Response(number, result=final)]}))
    assert [item.is_done for item in recording.requests] == [False] + [True] * 5


def test_a_server_that_stops_ends_the_run_with_what_there_is():
    server = Server()
    server.is_closed = True
    recording = Recording()
    with pytest.raises(RequestError, match="stopped before"):
        Driver(server).run(requests(2), Pace(), recording)
    assert len(recording.requests) == 2 and not recording.done


def test_percentiles_are_elements_never_between_them():
    found = percentiles([5, 1, 4, 2, 3, 6, 7, 8, 10, 9])
    assert (found["p50"], found["p90"], found["p95"], found["p99"]) == (6, 10, 10, 10)
    assert (found["minimum"], found["maximum"], found["average"]) == (1, 10, 5.5)
    assert percentiles([]) is None


def test_step_sizes_fall_into_classes_that_double():
    found = histogram([1, 2, 3, 4, 5, 8, 9, 16, 17])
    assert [(c["least"], c["most"], c["steps"]) for c in found] == [
        (1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 2), (9, 16, 2), (17, 32, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "code"), [(Interrupted, 130), (Terminated, 143)])
def test_an_end_before_the_first_token_still_makes_every_output(
    bench, drafted, tmp_path, monkeypatch, kind, code
):
    def interrupt(self, responses, *rest):
        raise kind

    monkeypatch.setattr("llmctl.cli.bench.driver.Driver._take", interrupt)
    page, trace, raw = (tmp_path / name for name in ("page.html", "trace.json", "raw.jsonl"))
    report, done = bench("latency", *drafted, "--baseline", "--warmup", 0, "--report", page,
                         "--trace", trace, "--raw", raw, code=code)  # fmt: skip
    assert report["is_partial"] and report["request_info"]["num_finished"] == 0
    assert report["streaming_metrics"]["ttft_ms"] is None and report["baseline"]["speedup"] is None
    assert "PARTIAL: interrupted; 0 requests had finished" in done.err
    assert (
        "PARTIAL" in page.read_text() and json.loads(trace.read_text())["otherData"]["is_partial"]
    )


def test_a_sweep_that_ended_early_recommends_nothing(bench, engines, monkeypatch):
    def interrupt(self, responses, *rest):
        raise Interrupted

    monkeypatch.setattr("llmctl.cli.bench.driver.Driver._take", interrupt)
    report, done = bench("latency", "--draft-engine", engines.draft, "--sweep-draft-len", "1,2",
                         code=130)  # fmt: skip
    assert report["sweep"] is None and "recommended" not in done.err


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    from llmctl.cli.bench.progress import Progress

    record = SimpleNamespace(arrivals=[SimpleNamespace(num_tokens=4)], is_done=True, error=None)
    with Progress(1000) as progress:
        for _ in range(1000):
            progress(record)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[4].startswith("500 of 1,000 requests, ")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Progress(1000) as progress:
        progress.say("draft length 4")
        for _ in range(999):
            progress(record)
        progress._bar.refresh()
    shown = capsys.readouterr().err
    assert "draft length 4" in shown and "999/1000" in shown and "tok/s" in shown

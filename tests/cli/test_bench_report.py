"""The files of `llmctl bench`: the HTML page and the trace."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from support.bench import raw

from llmctl.cli.bench.svg import nice_ticks

SHORT = ["--target-input-len", 12, "--target-output-len", 30, "--num-requests", 6]
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Headings, text and what is fetched; raises when tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        names = {"src", "href", "xlink:href", "srcset"}
        self.fetched += [value for name, value in attrs if name in names]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        self.words.append(data)


@pytest.fixture
def make(bench, tmp_path):
    """(report, page as text, parsed page) of a benchmark."""

    def call(*argv):
        path = tmp_path / "page.html"
        report, _ = bench(*argv, "--report", path)
        text = path.read_text()
        return report, text, Page(text)

    return call


def cells(page_text, label):
    row = re.search(rf"<tr><th>{re.escape(label)}</th>(.*?)</tr>", page_text)
    return re.findall(r"<td>(.*?)</td>", row[1])


def test_the_page_has_every_section_and_needs_nothing_from_anywhere(make, drafted):
    _, text, page = make("throughput", *drafted, *SHORT, "--baseline")
    assert page.fetched == [] and "url(" not in text and "@import" not in text
    assert "http://" not in text and "https://" not in text and "<script" not in text
    titles = " ".join(page.headings)
    for wanted in ("Percentiles", "Latency distribution", "Drafts", "Timeline of request",
                   "Share of the hardware limit", "Steps and KV cache", "Definitions"):  # fmt: skip
        assert wanted in titles
    charts = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(charts) == 10
    for chart in charts:
        root = ET.fromstring(chart)
        assert len(root) > 3 and root.get("aria-label")
        assert not re.search(r'"(nan|inf|-inf)', chart)


def test_the_pages_table_holds_the_reports_percentiles(make, drafted):
    report, text, _ = make("latency", *drafted, *SHORT)
    for label, section, key in (
        ("time to first token (TTFT)", "streaming_metrics", "ttft_ms"),
        ("verify, a step", "round_times", "verify_ms"),
    ):
        unit, *numbers = cells(text, label)
        assert unit == "ms"
        found = [float(number.replace(",", "")) for number in numbers]
        assert found == pytest.approx(list(report[section][key].values()), rel=1e-3, abs=0.01)


def test_a_page_without_drafts_has_no_section_about_them(make):
    _, _, page = make("latency", *SHORT)
    assert "Drafts" not in page.headings and "Percentiles" in page.headings


def test_synthetic_acceptance_is_marked_on_the_page_and_a_sweep_has_its_chart(make, engines):
    _, text, page = make("latency", "--draft-engine", engines.draft, *SHORT, "--sweep-draft-len",
                         "1..3", "--synthetic-acceptance", "[0.9,0.5,0.2]")  # fmt: skip
    assert '<p class="banner">SYNTHETIC ACCEPTANCE' in text
    assert "Which draft length" in page.headings and "cost model" in text


def test_text_from_outside_cannot_become_markup(make, llmctl, engines, tmp_path):
    data = tmp_path / "<b>&.jsonl"
    data.write_text(json.dumps({"input_ids": [5, 6], "output_tokens": 4}))
    _, text, _ = make("latency", "--dataset", data)
    assert "<b>&.jsonl" not in text and "&lt;b&gt;&amp;.jsonl" in text


@pytest.mark.parametrize(
    ("least", "most"), [(0, 1), (0, 0.00031), (3.2, 3.3), (0, 98765), (5, 5), (0, 0)]
)
def test_ticks_are_few_round_and_around_the_values(least, most):
    ticks = nice_ticks(least, most)
    assert 2 <= len(ticks) <= 9 or least == most
    assert ticks[0] <= least + 1e-9 and ticks[-1] >= most - 1e-9
    assert ticks == sorted(set(ticks))


# ---- trace ----


@pytest.fixture
def trace(bench, drafted, tmp_path):
    path = tmp_path / "trace.json"
    bench("throughput", *drafted, *SHORT, "--iterations", 2, "--baseline", "--concurrency", 3,
          "--trace", path, "--raw", tmp_path / "raw.jsonl")  # fmt: skip
    return json.loads(path.read_text()), raw(tmp_path / "raw.jsonl")


def test_a_trace_has_a_slice_per_step_and_none_overlaps_on_its_track(trace):
    document, (_, steps) = trace
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == 1 for event in slices) == len(steps)
    tracks = {(event["pid"], event["tid"]) for event in slices}
    assert tracks == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for track in tracks:
        ends = 0.0
        for event in sorted(
            (e for e in slices if (e["pid"], e["tid"]) == track), key=lambda e: e["ts"]
        ):
            assert event["dur"] >= 0 and event["ts"] >= ends - 200  # us: two clocks meet here
            ends = event["ts"] + event["dur"]
    names = {event["name"] for event in slices}
    assert {"prompts", "generation", "draft", "verify"} <= names


def test_a_trace_follows_each_request_from_submission_to_its_last_token(trace):
    document, (requests, _) = trace
    events = [event for event in document["traceEvents"] if event.get("cat") == "request"]
    assert len({event["id"] for event in events}) == len(requests) == 24
    for request_id in {event["id"] for event in events}:
        own = [event for event in events if event["id"] == request_id]
        assert [e["ph"] for e in own if e["ph"] != "n"] == ["b", "b", "e", "e"]
        assert own[0]["ts"] <= own[2]["ts"] <= own[-1]["ts"]
        assert own[-1]["args"]["output tokens"] == 30
    processes = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["draft length 3", "without drafts"]


def test_a_trace_counts_requests_blocks_and_tokens_within_their_bounds(trace):
    document, _ = trace
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"requests", "KV blocks", "tokens a step"}
    active = [e["args"]["active"] for e in counters if e["name"] == "requests"]
    assert max(active) == 3

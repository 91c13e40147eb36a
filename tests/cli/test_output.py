"""run.py's lines, the stream, the JSON object: compared with stored text, no engine needed."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace

import pytest

from llmctl.cli.run.generate import Row, generate
from llmctl.cli.run.output import StreamPrinter, print_rows, run_json
from llmctl.cli.run.report import stats_lines, summarize
from llmctl.errors import PromptTooLong, RequestError
from llmctl.runtime.kv_cache import KvCacheStats
from llmctl.runtime.request import FinishReason, Request, SamplingConfig
from llmctl.runtime.response import Response, Result
from llmctl.runtime.stats.counters import SpeculationStats


class Letters:
    """Token i is the i-th letter; 26 is half a character."""

    def decode(self, token_ids):
        return "".join("\ufffd" if i == 26 else chr(97 + i) for i in token_ids)

    def decode_so_far(self, token_ids):
        return self.decode(token_ids).rstrip("\ufffd")


class ScriptedExecutor:
    """Answers with prepared batches of responses."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def enqueue_requests(self, requests):
        return list(range(10, 10 + len(requests)))

    def await_responses(self):
        return self.batches.pop(0) if self.batches else []


def part(request_id, tokens, *, index=0, final=False, last=None, **fields):
    reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
    is_final = final if last is None else last
    result = Result(index, tuple(tokens), final, is_final, reason, **fields)
    return Response(request_id, result=result)


def rows(count, **sampling):
    config = SamplingConfig(**sampling)
    return [Row(i, f"p{i}", Request((1, 2, 3), 8, config)) for i in range(count)]


def test_rows_print_as_run_py_prints_them():
    two = rows(2)
    generate(
        ScriptedExecutor([part(11, [3], final=True)], [part(10, [0]), part(10, [1], final=True)]),
        two,
    )
    file = io.StringIO()
    print_rows(two, Letters(), file)
    assert file.getvalue() == (
        'Input [Text 0]: "p0"\n'
        'Output [Text 0 Beam 0]: "ab"\n'
        'Input [Text 1]: "p1"\n'
        'Output [Text 1 Beam 0]: "d"\n'
    )


def test_several_sequences_name_theirs():
    one = rows(1, num_return_sequences=2, top_k=0)
    first = part(10, [2], index=1, final=True, last=False)
    generate(ScriptedExecutor([first, part(10, [5], final=True)]), one)
    file = io.StringIO()
    print_rows(one, Letters(), file)
    assert file.getvalue() == (
        'Input [Text 0]: "p0"\n'
        'Output [Text 0 Seq 0 Beam 0]: "f"\n'
        'Output [Text 0 Seq 1 Beam 0]: "c"\n'
    )


def test_a_refused_row_has_its_input_line_alone_and_the_others_finish():
    two = rows(2)
    refused = Response(10, error=PromptTooLong("5 tokens, 4 fit"))
    generate(ScriptedExecutor([refused], [part(11, [0], final=True)]), two)
    file = io.StringIO()
    print_rows(two, Letters(), file)
    assert file.getvalue() == (
        'Input [Text 0]: "p0"\nInput [Text 1]: "p1"\nOutput [Text 1 Beam 0]: "a"\n'
    )
    assert isinstance(two[0].error, PromptTooLong) and two[1].error is None


def test_rows_that_never_became_requests_are_not_sent():
    bad = Row(0, "", error=PromptTooLong("x"))
    assert generate(ScriptedExecutor(), [bad]) == 0.0


def test_an_executor_that_closes_leaves_nobody_waiting():
    one = rows(1)
    generate(ScriptedExecutor(), one)
    assert isinstance(one[0].error, RequestError)


def test_a_stream_reprints_the_text_so_far_and_holds_half_characters():
    one = rows(1)
    file = io.StringIO()
    parts = [[part(10, [i])] for i in (0, 1, 26, 2)] + [[part(10, [3, 26], final=True)]]
    generate(ScriptedExecutor(*parts), one, StreamPrinter(Letters(), 1, file))
    assert file.getvalue().splitlines() == [
        'Input [Text 0]: "p0"',
        'Output [Text 0 Beam 0]: "a"',
        'Output [Text 0 Beam 0]: "ab"',
        'Output [Text 0 Beam 0]: "ab"',
        'Output [Text 0 Beam 0]: "ab\ufffdc"',
        'Output [Text 0 Beam 0]: "ab\ufffdcd\ufffd"',  # final: what is there is shown
    ]


def test_a_stream_prints_every_interval_and_at_the_end():
    one = rows(1)
    file = io.StringIO()
    parts = [[part(10, [0], final=i == 6)] for i in range(7)]
    generate(ScriptedExecutor(*parts), one, StreamPrinter(Letters(), 3, file))
    texts = [line.split('"')[1] for line in file.getvalue().splitlines()[1:]]
    assert texts == ["a" * 3, "a" * 6, "a" * 7]


def test_json_has_outputs_errors_and_statistics():
    two = rows(2)
    done = part(10, [0], final=True, log_probs=(-math.inf,), cum_log_prob=-math.inf)
    generate(ScriptedExecutor([done, Response(11, error=PromptTooLong("5", fix="cut"))]), two)
    spec = SpeculationStats(rounds=2, draft_tokens=4, accepted_tokens=3, verify_s=0.5)
    spec.accepted_at_position = [2, 1]
    text = run_json(two, Letters(), summarize(two, 2.0, 2, spec).to_json())
    loaded = json.loads(text)
    assert loaded["outputs"] == [
        {
            "index": 0,
            "prompt": "p0",
            "num_prompt_tokens": 3,
            "sequence": 0,
            "text": "a",
            "token_ids": [0],
            "finish_reason": "length",
            "log_probs": [None],
            "cum_log_prob": None,
        },
        {
            "index": 1,
            "prompt": "p1",
            "num_prompt_tokens": 3,
            "error": {"name": "PromptTooLong", "message": "5", "fix": "cut", "exit_code": 1},
        },
    ]
    stats = loaded["stats"]
    assert (stats["num_requests"], stats["num_failed"], stats["num_output_tokens"]) == (2, 1, 1)
    assert stats["speculation"]["acceptance_rate"] == 0.75
    assert stats["speculation"]["tokens_per_round"] == 2.5
    assert stats["speculation"]["accepted_at_position"] == [1.0, 0.5]


def test_statistics_for_people_name_every_number():
    one = rows(1)
    parts = [part(10, range(4))], [part(10, [7])], [part(10, range(3), final=True)]
    generate(ScriptedExecutor(*parts), one)
    one[0].first_token_s = one[0].sequences[0].first_s = 0.5
    one[0].sequences[0].last_s = 2.5
    spec = SpeculationStats(rounds=2, draft_tokens=4, accepted_tokens=3)
    spec.accepted_at_position = [2, 1]
    spec.draft_s, spec.verify_s, spec.host_s = 0.001, 0.004, 0.0005
    assert stats_lines(summarize(one, 4.0, 2, spec)) == [
        "8 tokens in 4.000 s: 2.0 tok/s (time to first token 500.0 ms, then 2.0 tok/s)",
        "acceptance 0.750 of 4 drafts, 2.50 tokens per round over 2 rounds (draft_len 2); "
        "kept at position: 1.00, 0.50",
        "per round: draft 0.500 ms, verify 2.000 ms, host 0.250 ms",
    ]
    plain = stats_lines(summarize(one, 4.0, 0, SpeculationStats(rounds=8, verify_s=0.008)))
    assert plain[1:] == ["per round: target 1.000 ms, host 0.000 ms"]


def test_statistics_tell_what_the_kv_cache_spared_and_moved():
    base = KvCacheStats(8, 4, 4, 32, 9, 8, 3, 6, reused_tokens=96, prompt_tokens=300)
    spec = SpeculationStats()
    found = [
        stats_lines(summarize([], 0.0, 0, spec, cache))[1:]
        for cache in (
            base,
            replace(base, reused_tokens=0),
            replace(base, evicted_blocks=5, host_max_num_blocks=9, onboarded_blocks=2),
        )
    ]
    assert found == [
        ["KV cache: 96 of 300 prompt tokens reused, 0 blocks evicted"],
        [],
        ["KV cache: 96 of 300 prompt tokens reused, 5 blocks evicted, 2 back from host memory"],
    ]
    assert summarize([], 0.0, 0, spec, base).to_json()["kv_cache"]["reused_tokens"] == 96


def late(gaps_s, monkeypatch):
    """A clock for `generate`: what passes between its readings."""
    times = iter(itertools.accumulate(gaps_s))
    monkeypatch.setattr("llmctl.cli.run.generate.perf_counter", lambda: next(times))


@pytest.mark.parametrize(
    ("batches", "wanted"),
    [
        ([[part(10, [0], final=True)]], None),
        ([[part(10, [0]), part(10, [1], final=True)]], None),  # taken together
        ([[part(10, [0])], [part(10, [1], final=True)]], None),  # one time between them
        ([[part(10, [0])], [part(10, [1]), part(10, [2], final=True)]], None),
        ([[part(10, [0])], [part(10, [1])], [part(10, [2, 3], final=True)]], 1.5),
        ([[part(10, [0]), part(10, [1])], [part(10, [2])], [part(10, [3], final=True)]], 1.0),
    ],
)
def test_a_decode_speed_needs_two_times_between_responses(batches, wanted, monkeypatch):
    late([0.0] + [1.0] * 9, monkeypatch)
    one = rows(1)
    total_s = generate(ScriptedExecutor(*batches), one)
    has_rounds = len(one[0].sequences[0].token_ids) > 1
    stats = summarize(one, total_s, 0, SpeculationStats(rounds=int(has_rounds)))
    assert stats.to_json()["decode_tokens_per_s"] == wanted
    line = stats_lines(stats)[0]
    assert ("then" in line) == (wanted is not None)
    assert (
        "tok/s" in line
        if has_rounds
        else line == ("1 token in 2.000 s (time to first token 1000.0 ms)")
    )


def test_the_first_tokens_of_several_outputs_are_no_decode_speed(monkeypatch):
    late([0.0] + [1.0] * 9, monkeypatch)
    one = rows(1, num_return_sequences=3, temperature=1.0)
    parts = [[part(10, [i], index=i, final=True, last=i == 2)] for i in range(3)]
    total_s = generate(ScriptedExecutor(*parts), one)
    stats = summarize(one, total_s, 0, SpeculationStats())
    assert stats.to_json()["decode_tokens_per_s"] is None
    assert stats_lines(stats) == ["3 tokens in 4.000 s (time to first token 1000.0 ms)"]


@pytest.mark.parametrize(("waits", "wanted"), [(True, None), (False, 2.0)])
def test_outputs_that_wait_for_others_are_no_decode_speed(waits, wanted, monkeypatch):
    """Six tokens after the first ones; of those of the first output, its 3 s would not count."""
    late([0.0] + [1.0] * 9, monkeypatch)
    two = rows(2)
    first, second = ([[part(10 + row, [i], final=i == 3)] for i in range(4)] for row in range(2))
    together = [one + other for one, other in zip(first, second, strict=True)]
    total_s = generate(ScriptedExecutor(*(first + second if waits else together)), two)
    stats = summarize(two, total_s, 0, SpeculationStats(rounds=8))
    assert stats.to_json()["decode_tokens_per_s"] == wanted


def test_no_acceptance_is_reported_of_no_drafts():
    stats = summarize([], 1.0, 4, SpeculationStats(rounds=1))
    assert stats_lines(stats)[1] == "nothing was drafted in 1 round (draft_len 4)"
    assert stats.to_json()["speculation"]["acceptance_rate"] is None
    assert stats.to_json()["speculation"]["tokens_per_round"] == 1
    found = summarize([], 1.0, 4, SpeculationStats()).to_json()["speculation"]
    assert found["tokens_per_round"] is None


@pytest.mark.parametrize("count", [0, 1])
def test_statistics_of_nothing_divide_by_nothing(count):
    failed = [Row(0, "", error=PromptTooLong("x"))][:count]
    stats = summarize(failed, 0.0, 4, SpeculationStats())
    assert stats_lines(stats) == ["0 tokens in 0.000 s"]
    assert stats.to_json()["decode_tokens_per_s"] is None

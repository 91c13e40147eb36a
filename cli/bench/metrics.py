"""The metrics of a benchmark: their definitions, computed only from raw records.

Key names end in their unit: _ms, _s, _tok_s (tokens per second), _req_s, _tokens, _blocks; rates
and fractions are between 0 and 1. Metrics that trtllm-bench has use its key and definition.
Percentile p of n sorted values is the element at index int(n * p), without interpolation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from llmctl.cli.bench.records import Recording, RequestRecord, Round, StepRecord

MOST_FAILURES = 5  # reasons that a report gives, the most frequent ones
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}

DEFINITIONS = {
    "ttft_ms": "time to first token: first response with tokens - submission",
    "itl_ms": "inter-token latency: time between responses; tokens of a round come together",
    "tpot_ms": "time per output token: (last token - first token) / (output tokens - 1)",
    "e2e_ms": "end to end: last token - submission",
    "gen_tok_s": "generation speed of a request with three responses or more, read apart: "
    "(output tokens - 1) / (last - first token)",
    "request_throughput_req_s": "finished requests / (last token - first submission)",
    "system_output_throughput_tok_s": "output tokens / (last token - first submission)",
    "system_total_throughput_tok_s": "input and output tokens / (last token - first submission)",
    "output_throughput_per_user_tok_s": "mean over requests of output tokens / end to end",
    "output_throughput_per_gpu_tok_s": "system output throughput / number of GPUs",
    "avg_concurrent_requests": "sum of end to end times / (last token - first submission)",
    "acceptance_length": "tokens per round, the target's own included: 1 + accepted / rounds",
    "acceptance_rate": "accepted / proposed drafts, those behind a rejection included",
    "acceptance_at_position": "share of rounds with an i-th draft that kept it",
    "conditional_acceptance": "share of those that kept draft i-1 which kept draft i as well",
    "draft_ms": "drafting in a step of nothing but generation",
    "verify_ms": "the target's pass in such a step (on a GPU with acceptance)",
    "host_ms": "the rest of such a step; near or below zero where a GPU runs ahead of the host",
    "kv_used_share": "KV blocks held by requests / all blocks, over steps",
    "step_tokens": "tokens per step: prompt chunks, last tokens and drafts",
    "issue_rate_req_s": "(submissions - 1) / (last - first submission)",
}


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50 to p99, minimum, maximum, average; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {name: ordered[int(len(ordered) * share)] for name, share in PERCENTILES.items()}
    average = sum(ordered) / len(ordered)
    return {**found, "minimum": ordered[0], "maximum": ordered[-1], "average": average}


# ---- one request ----


def ttft_ms(request: RequestRecord) -> float:
    """See DEFINITIONS, as for all that follow."""
    assert request.submit_s is not None
    return (request.arrivals[0].at_s - request.submit_s) * 1e3


def e2e_ms(request: RequestRecord) -> float:
    assert request.submit_s is not None
    return (request.arrivals[-1].at_s - request.submit_s) * 1e3


def tpot_ms(request: RequestRecord) -> float | None:
    """None for an output that came in one response."""
    first, last = request.arrivals[0].at_s, request.arrivals[-1].at_s
    count = len(request.output_ids) - 1
    return (last - first) * 1e3 / count if count and last > first else None


def gen_tok_s(request: RequestRecord) -> float | None:
    """None where there is one time between responses only: how late the first was read may be most
    of it."""
    tpot = tpot_ms(request)
    times = {arrival.at_s for arrival in request.arrivals}
    return None if tpot is None or len(times) < 3 else 1e3 / tpot


def itl_ms(request: RequestRecord) -> list[float]:
    times = [arrival.at_s for arrival in request.arrivals]
    return [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]


# ---- all of them ----


def compute(recording: Recording, num_gpus: int) -> dict[str, Any]:
    """Every metric of a recording. num_gpus 0: no figure per GPU."""
    done = recording.done
    steps = [step for step in recording.steps if not step.context_requests]
    rounds = [item for step in recording.steps for item in step.rounds]
    return {
        "request_info": _request_info(recording),
        "performance": _performance(done, num_gpus),
        "streaming_metrics": _streaming(done),
        "decoding_stats": _decoding(rounds),
        "round_times": _round_times(steps),
        "kv_cache": _kv_cache(recording.steps),
        "steps": _steps(recording.steps),
    }


def _request_info(recording: Recording) -> dict[str, Any]:
    done = recording.done
    count = len(done)
    failures = Counter(item.error for item in recording.requests if item.error is not None)
    return {
        "num_requests": len(recording.requests),
        "num_finished": count,
        "num_failed": sum(failures.values()),
        "failures": dict(failures.most_common(MOST_FAILURES)),
        "num_iterations": recording.num_iterations,
        "avg_input_length_tokens": sum(r.input_tokens for r in done) / count if count else None,
        "avg_output_length_tokens": sum(len(r.output_ids) for r in done) / count if count else None,
        "output_tokens": sum(len(r.output_ids) for r in done),
        "input_tokens": sum(r.input_tokens for r in done),
    }


def _performance(done: Sequence[RequestRecord], num_gpus: int) -> dict[str, Any]:
    """System-wide figures: the median over iterations, and those of each iteration."""
    iterations = sorted({item.iteration for item in done})
    each = [
        _one_iteration([r for r in done if r.iteration == number], num_gpus)
        for number in iterations
    ]
    names = each[0] if each else {}
    middle = {name: _median([item[name] for item in each]) for name in names}
    return {**middle, "iterations": each}


def _one_iteration(done: Sequence[RequestRecord], num_gpus: int) -> dict[str, float | None]:
    submits = [item.submit_s for item in done if item.submit_s is not None]
    total_s = max(item.arrivals[-1].at_s for item in done) - min(submits)
    inputs = sum(item.input_tokens for item in done)
    outputs = sum(len(item.output_ids) for item in done)
    latencies_s = [e2e_ms(item) / 1e3 for item in done]
    span_s = max(submits) - min(submits)
    return {
        "total_latency_ms": total_s * 1e3,
        "request_throughput_req_s": len(done) / total_s,
        "system_output_throughput_tok_s": outputs / total_s,
        "system_total_throughput_tok_s": (inputs + outputs) / total_s,
        "output_throughput_per_user_tok_s": _mean(
            [len(r.output_ids) / s for r, s in zip(done, latencies_s, strict=True)]
        ),
        "output_throughput_per_gpu_tok_s": outputs / total_s / num_gpus if num_gpus else None,
        "avg_concurrent_requests": sum(latencies_s) / total_s,
        "issue_rate_req_s": (len(done) - 1) / span_s if span_s > 0 else None,
    }


def _streaming(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Percentiles over the requests of all iterations; of itl over all gaps."""

    def each(metric: Callable[[RequestRecord], float | None]) -> list[float]:
        return [value for value in map(metric, done) if value is not None]

    return {
        "ttft_ms": percentiles(each(ttft_ms)),
        "itl_ms": percentiles(gap for item in done for gap in itl_ms(item)),
        "tpot_ms": percentiles(each(tpot_ms)),
        "e2e_ms": percentiles(each(e2e_ms)),
        "gen_tok_s": percentiles(each(gen_tok_s)),
    }


def _decoding(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Speculation; None where nothing was drafted."""
    drafted = sum(item.draft_tokens for item in rounds)
    if not drafted:
        return None
    accepted = sum(item.accepted_tokens for item in rounds)
    longest = max(item.draft_depth for item in rounds)
    kept = [sum(item.accepted_tokens > i for item in rounds) for i in range(longest)]
    asked = [sum(item.draft_depth > i for item in rounds) for i in range(longest)]
    # Of rounds that had an i-th draft, those that accepted the one before it.
    reached = [
        sum(item.draft_depth > i and item.accepted_tokens >= i for item in rounds)
        for i in range(longest)
    ]
    tokens = Counter(item.tokens for item in rounds)
    return {
        "rounds": len(rounds),
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted,
        "acceptance_length": 1 + accepted / len(rounds),
        "acceptance_at_position": [k / n for k, n in zip(kept, asked, strict=True)],
        "conditional_acceptance": [
            k / n if n else None for k, n in zip(kept, reached, strict=True)
        ],
        "tokens_per_round": {str(count): tokens[count] for count in sorted(tokens)},
    }


def _round_times(steps: Sequence[StepRecord]) -> dict[str, Any]:
    return {
        "num_steps": len(steps),
        "step_ms": percentiles(step.step_ms for step in steps),
        "draft_ms": percentiles(step.draft_ms for step in steps),
        "verify_ms": percentiles(step.verify_ms for step in steps),
        "host_ms": percentiles(step.host_ms for step in steps),
    }


def _kv_cache(steps: Sequence[StepRecord]) -> dict[str, Any] | None:
    if not steps:
        return None
    used = [step.kv_used_blocks for step in steps]
    most = steps[0].kv_max_blocks
    return {
        "max_blocks": most,
        "peak_used_blocks": max(used),
        "peak_used_share": max(used) / most,
        "mean_used_share": sum(used) / len(used) / most,
    }


def _steps(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """How large steps were, all of them."""
    sizes = [step.num_tokens for step in steps]
    return {
        "num_steps": len(steps),
        "step_tokens": percentiles(sizes),
        "step_size_histogram": histogram(sizes),
        "requests_per_step": percentiles(
            step.context_requests + len(step.rounds) for step in steps
        ),
    }


def histogram(sizes: Sequence[int]) -> list[dict[str, int]]:
    """Counts in classes 1, 2, 3 to 4, 5 to 8, ... tokens."""
    counts = Counter(max(0, size - 1).bit_length() for size in sizes)
    return [
        {"least": (1 << n >> 1) + 1 if n else 1, "most": 1 << n, "steps": counts[n]}
        for n in sorted(counts)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

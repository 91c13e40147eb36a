"""What adapts under load, on a GPU: draft lengths by batch size and acceptance, prompt chunks.

    python scripts/bench_load.py TARGET DRAFT [--batches 1,4,16,64] [--tokens 600]

Prints two Markdown tables. Drafts: tokens/s of plain decoding and of adaptive draft lengths, the
drafts accepted by lot (`runtime/synthetic.py`) at each acceptance, the controller new every time.
Chunks: step times of 16 requests that generate while 8 prompts of 4,000 tokens arrive, and tokens/s
of prompts alone, by chunk size and by --max-step-ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from llmctl.cli.engines import EngineOptions, OpenEngines, check_engines
from llmctl.cli.speculation import Speculation
from llmctl.runtime.core import Request
from llmctl.runtime.executor import Executor
from llmctl.runtime.synthetic import SyntheticAcceptance

ACCEPTANCES = (0.0, 0.5, 0.9)  # of each draft, after those before it stood
PROMPT, LONG_PROMPT, NUM_LONG = 16, 4000, 8


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random ids that every vocabulary has."""
    ids = np.random.default_rng(seed).integers(100, 10_000, (count, length))
    return [tuple(row) for row in ids.tolist()]


def run_all(executor: Executor, requests: list[Request]) -> float:
    """Seconds until the last has ended."""
    began = perf_counter()
    for request_id in executor.enqueue_requests(requests):
        while True:
            (*_, last) = executor.await_responses(request_id)
            if last.error is not None:
                raise last.error
            if last.result is not None and last.result.is_final:
                break
    return perf_counter() - began


def measure_drafts(engines: OpenEngines, batches: list[int], num_tokens: int) -> None:
    """The first table."""
    draft_len = engines.checked.draft_len
    print(
        "| batch | acceptance | plain tok/s | adaptive tok/s | ratio | steps with drafts | mean |"
    )
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        work = [Request(ids, num_tokens) for ids in prompts(batch, PROMPT)]
        warm = [replace(request, max_tokens=24) for request in work]
        with engines.executor(is_speculative=False) as executor:
            run_all(executor, warm)
            plain_s = run_all(executor, work)
        for share in ACCEPTANCES:
            rates = tuple(share ** (index + 1) for index in range(draft_len))
            acceptance = SyntheticAcceptance(rates)
            with engines.executor(
                acceptance=acceptance, num_iterations_kept=num_tokens + 50
            ) as executor:
                seconds = run_all(executor, work)
                steps = executor.get_latest_iteration_stats()
            drafted = [r.num_draft_tokens for step in steps for r in step.rounds]
            used = [length for length in drafted if length]
            plain, found = (batch * num_tokens / s for s in (plain_s, seconds))
            print(
                f"| {batch} | {share} | {plain:.0f} | {found:.0f} | {found / plain:.3f} | "
                f"{len(used) / max(1, len(drafted)):.2f} | {np.mean(used or [0]):.1f} |",
                flush=True,
            )


@contextmanager
def limited(engines: OpenEngines, **options: object) -> Iterator[Executor]:
    """An executor of plain decoding with other options."""
    before = engines.checked
    engines.checked = replace(before, options=replace(before.options, **options))  # type: ignore[arg-type]
    try:
        with engines.executor(is_speculative=False, num_iterations_kept=4000) as executor:
            yield executor
    finally:
        engines.checked = before


def measure_chunks(engines: OpenEngines, sizes: list[int]) -> None:
    """The second table."""
    print("\n| chunks | prompts alone, tok/s | step ms p50 | p99 | max | seconds for all |")
    print("|---|---|---|---|---|---|")
    cases: list[tuple[str, dict[str, object]]] = [
        (f"{size} tokens", {"max_num_tokens": size}) for size in sizes
    ]
    cases += [(f"--max-step-ms {value}", {"max_step_ms": value}) for value in (10.0, 20.0, "auto")]
    for name, options in cases:
        with limited(engines, **options) as executor:
            run_all(executor, [Request(ids, 1) for ids in prompts(6, LONG_PROMPT, 1)])
            alone = [Request(ids, 1) for ids in prompts(16, LONG_PROMPT, 2)]
            speed = len(alone) * LONG_PROMPT / run_all(executor, alone)
            executor.get_latest_iteration_stats()
            short = [Request(ids, 150) for ids in prompts(16, PROMPT, 3)]
            long = [Request(ids, 2) for ids in prompts(NUM_LONG, LONG_PROMPT, 4)]
            seconds = run_all(executor, short + long)
            steps = [s.iter_latency_ms for s in executor.get_latest_iteration_stats()]
        p50, p99 = np.percentile(steps, [50, 99])
        print(
            f"| {name} | {speed:.0f} | {p50:.2f} | {p99:.2f} | {max(steps):.2f} | {seconds:.2f} |",
            flush=True,
        )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--sizes", default="256,512,1024,2048")
    arguments = parser.parse_args()
    speculation = Speculation(None, draft_engine=arguments.draft)
    options = EngineOptions(arguments.target, speculation, adaptive_draft_len=True)
    options = replace(options, enable_block_reuse=False)
    engines = OpenEngines(check_engines(options))
    measure_drafts(engines, [int(n) for n in arguments.batches.split(",")], arguments.tokens)
    measure_chunks(engines, [int(n) for n in arguments.sizes.split(",")])


if __name__ == "__main__":
    main()

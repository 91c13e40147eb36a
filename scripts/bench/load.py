"""Adaptive draft lengths and prompt chunks under load, on a GPU.

    python -m scripts.bench.load TARGET DRAFT [--output docs/performance] [--batches 1,2,4,...]
        [--tokens 600] [--sizes 256,512,...] [--parts drafts,chunks] [--raw FILE]

Prints two Markdown tables; with --output they are stored as load.md, and as load.jsonl with every
number. --raw writes the steps behind them.

Drafts: tokens/s of plain decoding and of adaptive draft lengths for requests of 16 + `tokens`
tokens that start together, the drafts accepted at random (`synthetic_acceptance.py`).
The controller starts anew every time, so the numbers include what it loses to learning. With
drafts requests end one after another, so the ratio is given twice: of the whole runs, and from the
start to the end of the last step in which all of them generate.

Chunks: by chunk size and by --max-step-ms, tokens/s of prompts of 4,000 tokens alone, and the time
from step to step while 16 requests generate and 8 such prompts are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from llmctl.runtime.stats.counters import IterationStats
from scripts.bench.rows import provenance
from scripts.bench.rows import replace as replace_file

ACCEPTANCES = (0.0, 0.5, 0.9)  # of each draft, if those before it were accepted
MAX_STEP_MS = (10.0, 20.0, "auto")
PROMPT, LONG_PROMPT = 16, 4000
SETTLE_S = 10.0  # for what an executor captures while it has no requests
NUM_SETTLE, NUM_ALONE, NUM_BESIDE, NUM_GENERATING = 24, 16, 8, 16  # requests of a chunks row
HEADS = {
    "drafts": "| batch | acceptance | plain tok/s | adaptive tok/s | ratio | while all generate "
    "| rounds with drafts | mean drafts |\n|---|---|---|---|---|---|---|---|",
    "chunks": "| chunks | prompts alone, tok/s | step ms p50 | p99 | longest | prompts beside "
    "generation, tok/s |\n|---|---|---|---|---|---|",
}


class Tables:
    """Both tables: printed row by row, and stored in a folder as they grow."""

    def __init__(self, folder: Path | None, raw: Path | None) -> None:
        self._folder, self._raw = folder, raw
        self._rows: list[dict[str, Any]] = []
        self._common = provenance()

    def begin(self, part: str) -> None:
        """A table's head."""
        print(HEADS[part], flush=True)

    def add(self, part: str, line: str, values: dict[str, Any]) -> None:
        """One row, for people and with its numbers."""
        print(line, flush=True)
        self._rows.append({"part": part, "line": line, **values})
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = [{k: v for k, v in row.items() if k != "line"} for row in self._rows]
        lines = [json.dumps(row | self._common) + "\n" for row in stored]
        replace_file(self._folder / "load.jsonl", "".join(lines))
        replace_file(self._folder / "load.md", self._markdown())

    def keep(self, name: str, steps: list[IterationStats]) -> None:
        """The steps of a run, where they are asked for: end (s), step, drafting and verification
        (ms), prompt tokens, sequences that generate, their drafts and tokens."""
        if self._raw is None:
            return
        rows = [
            (
                *(round(value, 4) for value in (step.end_s % 1e4, step.iter_latency_ms)),
                *(round(ms, 3) for ms in (step.draft_latency_ms, step.verify_latency_ms)),
                step.inflight_batching_stats.num_ctx_tokens,
                len(step.rounds),
                sum(item.num_draft_tokens for item in step.rounds),
                sum(item.num_tokens for item in step.rounds),
            )
            for step in steps
        ]
        with self._raw.open("a") as file:
            file.write(json.dumps([name, rows]) + "\n")

    def _markdown(self) -> str:
        common = self._common
        versions = ", ".join(f"{name} {value}" for name, value in common["versions"].items())
        text = [
            "# Adaptive draft lengths and prompt chunks under load\n",
            f"`{common['command']}` · {versions} · {common['date']} · commit {common['commit']}",
        ]
        for part, head in HEADS.items():
            lines = [row["line"] for row in self._rows if row["part"] == part]
            if lines:
                text += [f"\n## {part.capitalize()}\n", head, *lines]
        return "\n".join(text) + "\n"


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Ids that every planted vocabulary has."""
    ids = np.random.default_rng(seed).integers(100, 4000, (count, length))
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


def together(steps: list[IterationStats], batch: int) -> float:
    """Tokens/s from the start to the end of the last step in which all requests generate."""
    last = max(index for index, step in enumerate(steps) if len(step.rounds) == batch)
    num_tokens = sum(item.num_tokens for step in steps[: last + 1] for item in step.rounds)
    began = steps[0].end_s - steps[0].iter_latency_ms / 1e3
    return num_tokens / (steps[last].end_s - began)


def measure_drafts(
    engines: OpenEngines, batches: list[int], num_tokens: int, tables: Tables
) -> None:
    """The first table."""
    draft_len, checked = engines.checked.draft_len, engines.checked
    tables.begin("drafts")
    for batch in batches:
        engines.checked = replace(checked, options=replace(checked.options, max_batch_size=batch))
        work = [Request(ids, num_tokens) for ids in prompts(batch, PROMPT)]
        warm = [replace(request, max_tokens=24) for request in work]
        kept = num_tokens + 50
        with engines.executor(is_speculative=False, num_iterations_kept=kept) as executor:
            run_all(executor, warm)
            executor.settle(SETTLE_S)
            executor.get_latest_iteration_stats()
            plain_s = run_all(executor, work)
            steps = executor.get_latest_iteration_stats()
            tables.keep(f"plain-{batch}", steps)
            plain_together = together(steps, batch)
        with engines.executor() as executor:
            run_all(executor, warm)
        for share in ACCEPTANCES:
            rates = tuple(share ** (index + 1) for index in range(draft_len))
            synthetic = SyntheticAcceptance(rates)
            with engines.executor(acceptance=synthetic, num_iterations_kept=kept) as executor:
                executor.settle(SETTLE_S)
                seconds = run_all(executor, work)
                steps = executor.get_latest_iteration_stats()
            tables.keep(f"adaptive-{batch}-{share}", steps)
            drafted = [r.num_draft_tokens for step in steps for r in step.rounds]
            used = [length for length in drafted if length]
            plain, found = (batch * num_tokens / s for s in (plain_s, seconds))
            part, mean = len(used) / max(1, len(drafted)), float(np.mean(used or [0]))
            all_ratio = together(steps, batch) / plain_together
            line = f"| {batch} | {share} | {plain:.0f} | {found:.0f} | {found / plain:.3f} | "
            line += f"{all_ratio:.3f} | "
            values = {"batch": batch, "acceptance": share, "plain_tok_s": plain}
            values |= {"adaptive_tok_s": found, "ratio": found / plain, "ratio_all": all_ratio}
            values |= {"share_with_drafts": part, "mean_drafts": mean}
            tables.add("drafts", f"{line}{part:.2f} | {mean:.1f} |", values)
    engines.checked = checked


@contextmanager
def limited(engines: OpenEngines, **options: Any) -> Iterator[Executor]:
    """An executor of plain decoding with other options."""
    before = engines.checked
    engines.checked = replace(before, options=replace(before.options, **options))
    try:
        with engines.executor(is_speculative=False, num_iterations_kept=8000) as executor:
            yield executor
    finally:
        engines.checked = before


def measure_chunks(engines: OpenEngines, sizes: list[int], tables: Tables) -> None:
    """The second table."""
    tables.begin("chunks")
    cases: list[tuple[str, dict[str, object]]] = [
        (f"{size} tokens", {"max_num_tokens": size}) for size in sizes
    ]
    cases += [(f"--max-step-ms {value}", {"max_step_ms": value}) for value in MAX_STEP_MS]
    for name, options in cases:
        with limited(engines, **options) as executor:
            settle = NUM_SETTLE if "max_step_ms" in options else NUM_ALONE // 4
            run_all(executor, [Request(ids, 1) for ids in prompts(settle, LONG_PROMPT, 1)])
            alone = [Request(ids, 1) for ids in prompts(NUM_ALONE, LONG_PROMPT, 2)]
            speed = len(alone) * LONG_PROMPT / run_all(executor, alone)
            tables.keep(f"chunks-{name}-alone", executor.get_latest_iteration_stats())
            short = [Request(ids, 400) for ids in prompts(NUM_GENERATING, PROMPT, 3)]
            long = [Request(ids, 1) for ids in prompts(NUM_BESIDE, LONG_PROMPT, 4)]
            run_all(executor, short + long)
            steps = executor.get_latest_iteration_stats()
            tables.keep(f"chunks-{name}-beside", steps)
        # From the end of one step to the end of the next, where both prompts and generation ran.
        mixed = [
            (step.end_s - before.end_s, step.inflight_batching_stats.num_ctx_tokens)
            for before, step in zip(steps, steps[1:], strict=False)
            if step.rounds and step.inflight_batching_stats.num_ctx_tokens
        ]
        times = [1e3 * seconds for seconds, _ in mixed]
        beside = sum(count for _, count in mixed) / sum(seconds for seconds, _ in mixed)
        p50, p99 = (float(value) for value in np.percentile(times, [50, 99]))
        line = f"| {name} | {speed:.0f} | {p50:.2f} | {p99:.2f} | {max(times):.2f} | {beside:.0f} |"
        values = {"chunks": name, "alone_tok_s": speed, "beside_tok_s": beside}
        values |= {"step_ms_p50": p50, "step_ms_p99": p99, "step_ms_max": max(times)}
        tables.add("chunks", line, values)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--parts", default="drafts,chunks")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--sizes", default="256,512,1024,2048,4096,8192")
    arguments = parser.parse_args()
    options = EngineOptions(arguments.target, DraftEngine(arguments.draft), adaptive_draft_len=True)
    options = replace(options, enable_block_reuse=False)
    engines = OpenEngines(check_engines(options))
    tables = Tables(arguments.output, arguments.raw)
    parts = arguments.parts.split(",")
    if "drafts" in parts:
        batches = [int(count) for count in arguments.batches.split(",")]
        measure_drafts(engines, batches, arguments.tokens, tables)
    if "chunks" in parts:
        measure_chunks(engines, [int(size) for size in arguments.sizes.split(",")], tables)


if __name__ == "__main__":
    main()

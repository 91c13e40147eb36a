"""Speed of the CUDA backend on generated weights: one command, one table.

    python -m scripts.bench.cuda --engines DIR [--rows pair,heads] [--rounds 5] [--output DIR]

DIR is what scripts/bench/build_engines built: engines of planted weights. Rows, each with minimum,
median and maximum over the rounds:

  read           bandwidth of a plain read of device memory: the limit that shares refer to
  decode-*       ms a step without a draft from 1,000 to 1,128 tokens of context: as seen by a
                 client, on the device alone, and what the device waits for the host
  speed-*        tok/s without a draft, 500 in and 512 out, prefill included
  prefill-*      2,048 tokens: ms, and the share of 1,979 TFLOP/s
  pair-*         tok/s of a pair, draft length 10 (-kN: N), 500 in and 1,024 out, prefill included
                 (its limit is what drafts and verification must read for the measured tokens);
                 the acceptance length; ms of a draft step in the loop, of a verification, of a
                 round, and of what the device waits for the host; how much longer a verification
                 takes than a step of one token, both from 1,000 to 1,128 tokens of context and
                 with the weights in the same place, for some places are read faster

Every output is compared with the text that planted weights must give.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from llmctl.builder.engine_format import read_engine_config
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from scripts.bench.drafting import Drafting, find_drafting, read_bytes
from scripts.bench.request_timing import Timed, generate
from scripts.bench.rows import Table, row

CONTEXT, PROMPT, OUTPUT = 1000, 500, 1024
# Drafts accept 0.873 of their tokens where the others agree; p880 and p916 are what NVIDIA's
# published speeds of these pairs imply (6.29 and 7.37 tokens a round). -kN: N drafts per round.
# -tD[xBxN...]: the tree D,B,N. Medusa heads: 3.5 tokens a round; EAGLE heads, 5 drafts: 3.6.
TARGETS = (
    "70b,8b,3b,1b,70b+1b,70b+1b-head8,70b+3b,70b+3b-head8,70b+8b,70b+8b-head8,"
    "70b+3b-p880,70b+8b-p916,70b+8b-head8-p916,70b+1b-k13,70b+1b-head8-k13,70b+8b-k8,"
    "8b-mxfp4,70b+8b-mxfp4,70b+8b-mxfp4-k8,70b+8b-mxfp4-head4,70b-medusa,8b-medusa,"
    "70b-eagle,8b-eagle,70b-eagle-tree,70b-eagle-tree-d6,70b-room24+1b-t12x2x23x1,70b-room24+1b-t10x2x20,"
    "8b-lookahead"
)
SETTLE_S = 10.0  # for what an executor captures while it has no requests
PEAK_TFLOPS = 1979.0  # FP8 dense, H100 SXM and H200 datasheets


class Bench:
    """Engines by name, opened once and closed as soon as a row needs the memory."""

    def __init__(self, engines: Path, rounds: int, bandwidth: float, table: Table) -> None:
        self.engines = engines
        self.rounds = rounds
        self.bandwidth = bandwidth  # bytes/s
        self.add = table.add
        self._random = np.random.default_rng(0)

    def open(self, name: str, drafting: Drafting | None) -> OpenEngines:
        """A target, alone or with what drafts. Whatever was open before must have been let go."""
        gc.collect()
        torch.cuda.empty_cache()
        method = PlainDecoding() if drafting is None else drafting.method(self.engines)
        target = name if drafting is None else drafting.target
        options = EngineOptions(
            self.engines / target, method, max_tokens=8192, enable_block_reuse=False
        )
        began = perf_counter()
        opened = OpenEngines(check_engines(options), log=lambda lines: print("\n".join(lines)))
        print(f"# opened {name} in {perf_counter() - began:.1f} s", flush=True)
        return opened

    def prompt(self, opened: OpenEngines, count: int) -> list[int]:
        """Random ordinary ids."""
        first, stop = opened.checked.target.weights["ordinary_tokens"]
        return [int(token) for token in self._random.integers(first, stop, count)]

    def expect(self, opened: OpenEngines, prompt: list[int], tokens: list[int]) -> None:
        """Raise when the output is not what the planted weights say."""
        from llmctl.runtime.engines.planted_weights import planted_text

        wanted = planted_text(opened.checked.target.weights, prompt[-1], len(tokens))
        if tokens != wanted:
            place = next(i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b)
            sys.exit(f"wrong text at token {place}: {tokens[place]}, wanted {wanted[place]}")


def prompt_ms(engine: Engine, count: int) -> float:
    """A prompt at the FP8 peak: all linear layers but the head, which runs for one token."""
    config = engine.config.pretrained_config
    hidden, size = config["hidden_size"], config["head_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * size * (2 * heads[0] + 2 * heads[1])
    each = attention + 3 * hidden * config["intermediate_size"]
    return 2 * config["num_hidden_layers"] * each * count / PEAK_TFLOPS / 1e9


def requests(
    bench: Bench,
    opened: OpenEngines,
    prompt_len: int,
    output: int,
    *,
    is_speculative: bool,
    rounds: int | None = None,
) -> list[Timed]:
    """One request after another, each checked; the first, which captures graphs, is not counted,
    and what the executor captures while it has none is waited for."""
    runs = []
    with opened.executor(is_speculative=is_speculative) as executor:
        for _ in range((rounds or bench.rounds) + 1):
            prompt = bench.prompt(opened, prompt_len)
            executor.settle(SETTLE_S)
            runs.append(generate(executor, prompt, output))
            bench.expect(opened, prompt, runs[-1].tokens)
    return runs[1:]


def verifications(runs: list[Timed]) -> list[float]:
    """Of each run the ms of a verification, or of a step of one token without a draft."""
    return [1e3 * run.verify_s / run.rounds for run in runs]


def decode(bench: Bench, opened: OpenEngines, name: str) -> None:
    """Plain decoding with CONTEXT tokens of context, and rounds of one token on the device."""
    runs = requests(bench, opened, CONTEXT, 128, is_speculative=False)
    step_ms = [run.decode_s_per_token * 1e3 for run in runs]
    device_ms = verifications(runs)
    host_ms = [s - d for s, d in zip(step_ms, device_ms, strict=True)]
    floor_ms = read_bytes(opened.target, CONTEXT) / bench.bandwidth * 1e3
    bench.add(
        row(f"decode-{name}", "ms/step", step_ms, floor_ms, f"{1e3 / median(step_ms):.1f} tok/s"),
        row(f"decode-{name}-device", "ms/step", device_ms, floor_ms),
        row(f"decode-{name}-host", "ms/step", host_ms),
    )


def speed(bench: Bench, opened: OpenEngines, name: str, output: int) -> None:
    """tok/s of plain generation, prefill included."""
    runs = requests(bench, opened, PROMPT, output, is_speculative=False)
    rates = [output / run.total_s for run in runs]
    limit = bench.bandwidth / read_bytes(opened.target, PROMPT + output // 2)
    bench.add(row(f"speed-{name}", "tok/s", rates, limit))


def drafted(bench: Bench, opened: OpenEngines, name: str, drafting: Drafting) -> None:
    """A target with what drafts: whole requests, and what a round is made of."""
    runs = requests(bench, opened, PROMPT, OUTPUT, is_speculative=True)
    rates = [OUTPUT / run.total_s for run in runs]
    lengths = [1 + run.accepted / run.rounds for run in runs]
    draft_ms = [1e3 * run.draft_s / run.rounds / drafting.steps for run in runs]
    verify_ms = verifications(runs)
    round_ms = [1e3 * (r.total_s - r.arrivals[0][0]) / (len(r.arrivals) - 1) for r in runs]
    device_ms = [1e3 * (run.draft_s + run.verify_s) / run.rounds for run in runs]
    host_ms = [r - d for r, d in zip(round_ms, device_ms, strict=True)]
    outside_ms = [r - v for r, v in zip(round_ms, verify_ms, strict=True)]
    first_ms = [1e3 * run.arrivals[0][0] for run in runs]
    context = PROMPT + OUTPUT // 2
    reads = [drafting.step_bytes(opened, context), read_bytes(opened.target, context)]
    draft_floor, verify_floor = (1e3 * num_bytes / bench.bandwidth for num_bytes in reads)
    outside_floor = drafting.steps * draft_floor
    floor_ms = outside_floor + verify_floor
    expected = drafting.expected_length(opened) or median(lengths)
    rate = OUTPUT / (median(first_ms) + (OUTPUT - 1) / expected * median(round_ms)) * 1e3
    note = f"at the expected {expected:.2f} tokens a round {rate:.1f} tok/s"
    published = drafting.published
    if published is not None:
        note = f"{median(rates) / published:.2f}x the published {published}; {note}"
        note += f", {rate / published:.2f}x"
    label = f"{drafting.row}-{name}"
    bench.add(
        row(label, "tok/s", rates, 1e3 * median(lengths) / floor_ms, note),
        row(f"{label}-acceptance-length", "tokens", lengths),
        row(f"{label}-draft-step", "ms", draft_ms, draft_floor),
        row(f"{label}-verify", "ms", verify_ms, verify_floor),
        row(f"{label}-round", "ms", round_ms, floor_ms),
        row(f"{label}-outside-verify", "ms", outside_ms, outside_floor),
        row(f"{label}-host", "ms", host_ms),
        row(f"{label}-first-token", "ms", first_ms, prompt_ms(opened.target, PROMPT)),
    )
    steps = requests(bench, opened, CONTEXT, 128, is_speculative=False, rounds=1)
    runs = requests(bench, opened, CONTEXT, 128, is_speculative=True)
    (step_ms,) = verifications(steps)
    growth = [100 * (each / step_ms - 1) for each in verifications(runs)]
    note = f"over a step of one token, {step_ms:.3f} ms, in the same contexts and place"
    bench.add(row(f"{label}-verify-growth", "%", growth, note=note))


def prefill(bench: Bench, opened: OpenEngines, name: str, count: int) -> None:
    """Time to the first token of one prompt, as a share of the FP8 peak."""
    runs = requests(bench, opened, count, 1, is_speculative=False)
    times_ms = [1e3 * run.total_s for run in runs]
    peak_ms = prompt_ms(opened.target, count)
    note = f"{peak_ms / median(times_ms):.1%} of {PEAK_TFLOPS:.0f} TFLOP/s"
    bench.add(row(f"prefill-{name}-{count}", "ms", times_ms, peak_ms, note))


def run_rows(bench: Bench, wanted: list[str], targets: list[str]) -> None:
    """Open engines, measure, close."""
    for name in targets:
        drafting = find_drafting(name)
        opened = bench.open(name, drafting)
        if drafting is None and "decode" in wanted:
            decode(bench, opened, name)
        if drafting is None and "speed" in wanted:
            speed(bench, opened, name, 512)
        if drafting is None and "prefill" in wanted:
            prefill(bench, opened, name, 2048)
        if drafting is not None and drafting.row in wanted:
            drafted(bench, opened, name, drafting)
        free, total = torch.cuda.mem_get_info()
        print(f"# {(total - free) / 1e9:.2f} GB of device memory in use")
        del opened


def main() -> None:
    """Parse, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--rows", default="decode,speed,prefill,pair,heads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for <device>.jsonl and <device>.md")
    arguments = parser.parse_args()
    reads = read_bandwidth()
    torch.cuda.empty_cache()
    targets = arguments.targets.split(",")
    first = find_drafting(targets[0])
    name = targets[0] if first is None else first.target
    made = read_engine_config(arguments.engines / name).versions
    kernels = ", ".join(f"{name} {made.get(name, '?')}" for name in ("nvrtc", "triton"))
    table = Table(arguments.output, kernels)
    table.add(row("read", "TB/s", reads))
    bench = Bench(arguments.engines, arguments.rounds, median(reads) * 1e12, table)
    run_rows(bench, arguments.rows.split(","), targets)


if __name__ == "__main__":
    main()

"""Speed of the CPU backend and of Hugging Face transformers: same machine, same weights, one run.

    python -m scripts.bench.cpu [--rounds 5] [--output docs/performance]

Four questions, each a table row with minimum, median and maximum over the rounds:

  demo      the demo target, batch 1, greedy: `generate`, ours, `generate(assistant_model=...)`,
            ours with the draft engine; systems alternate within a round, ratios are per round
  heads     the demo target with its ReDrafter and EAGLE heads, and without, in the same way
  1b        a random checkpoint of Llama-3.2-1B's shape: bytes a decode step must read over its
            time, as a share of the read bandwidth measured in the same process, with a short
            context and with one of 8,000 tokens
  help      wall time of the process `llmctl --help`

With --output, rows go to cpu.jsonl and cpu.md there.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from llmctl.plugins.backends.cpu import instruction_sets, num_threads
from llmctl.plugins.backends.cpu.binding import load_kernels
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.bench.cpu_heads import bench_heads
from scripts.compare import peers

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET, DRAFT = REPOSITORY / "examples/demo-target", REPOSITORY / "examples/demo-draft"
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS, DRAFT_LEN = 4, 128, 128, 4
CONTEXTS = (16, 8000)  # tokens, of the 1B shape


@dataclass(frozen=True)
class Row:
    """One measured quantity over the rounds."""

    name: str
    value: float  # median
    unit: str
    minimum: float
    maximum: float
    share_of_limit: float | None = None


def row(name: str, unit: str, values: list[float], share: float | None = None) -> Row:
    """Median, minimum and maximum of one quantity."""
    return Row(name, median(values), unit, min(values), max(values), share)


def held_out_tasks() -> list[peers.Task]:
    """NUM_PROMPTS prompts of PROMPT_TOKENS tokens, spread over the held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    text = (REPOSITORY / "examples/heldout.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, NUM_PROMPTS).astype(int)
    prompts = [ids[start : start + PROMPT_TOKENS] for start in starts]
    return [peers.Task(prompt, OUTPUT_TOKENS) for prompt in prompts]


def bench_demo(folder: Path, dtype: str, rounds: int) -> list[Row]:
    """The four systems in turn, and their ratios round by round."""
    torch_dtype = getattr(torch, dtype)
    model, assistant = (
        peers.load_transformers(path, torch_dtype, "cpu") for path in (TARGET, DRAFT)
    )
    options = ("--backend", "cpu", "--dtype", dtype, "--max-batch-size", "4")
    target_dir, draft_dir = peers.build_pair(TARGET, DRAFT, DRAFT_LEN, folder / dtype, *options)
    engines = [
        peers.open_engines(target_dir, None, 0),
        peers.open_engines(target_dir, draft_dir, DRAFT_LEN),
    ]
    with engines[0].executor() as plain, engines[1].executor() as speculative:
        systems = {
            "transformers": peers.transformers_system(model),
            "llmctl": peers.one_by_one(plain),
            "transformers+assistant": peers.transformers_system(model, assistant_model=assistant),
            "llmctl+draft": peers.one_by_one(speculative),
        }
        measured = peers.take_turns(systems, held_out_tasks(), rounds)
        stats = speculative.get_speculation_stats()
    outputs = measured.outputs
    assert outputs["llmctl"] == outputs["llmctl+draft"], "the draft changed the output"
    pairs = [
        ("llmctl", "transformers"),
        ("llmctl+draft", "transformers+assistant"),
        ("llmctl+draft", "llmctl"),
    ]
    rows = [
        row(item.name, item.unit, [item.minimum, item.value, item.maximum])
        for item in measured.rows(pairs, f"demo {dtype} ")
    ]
    rows.append(row(f"demo {dtype} acceptance rate", "share", [stats.acceptance_rate]))
    rows.append(row(f"demo {dtype} tokens per round", "tokens", [stats.acceptance_length]))
    return rows


def read_bandwidth(seconds: float = 3.0) -> list[float]:
    """GB/s of repeated reads of 2 GiB by all threads; the machine's limit for decoding."""
    buffer = np.ones(1 << 29, np.float32)
    speeds = []
    end = perf_counter() + seconds
    while perf_counter() < end:
        began = perf_counter()
        num_bytes = load_kernels().llmctl_measure_read(buffer.ctypes.data, len(buffer))
        speeds.append(num_bytes / (perf_counter() - began) / 1e9)
    return speeds


def bench_1b(folder: Path, quantization: str, steps: int) -> list[Row]:
    """Decode steps of a 1B-shaped engine against the measured read bandwidth."""
    checkpoint, engine = folder / f"1b-{quantization}", folder / f"engine-1b-{quantization}"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.models.make_random_checkpoint",
            checkpoint,
            "--shape",
            "1b",
            "--quantization",
            quantization,
        ],
        check=True,
    )
    peers.llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", engine,
                 "--backend", "cpu", "--max-batch-size", "1", "--max-seq-len", "8192")  # fmt: skip
    engines = OpenEngines(check_engines(EngineOptions(engine)))
    limits, times = read_bandwidth(), {}
    with engines.executor() as executor:
        for context in CONTEXTS:
            ids = tuple(5 + index % 1000 for index in range(context))
            executor.await_responses(executor.enqueue_request(Request(ids, steps + 1)))
            stats = executor.get_latest_iteration_stats()[-steps + 1 :]
            times[context] = [each.iter_latency_ms / 1e3 for each in stats]
    limits += read_bandwidth()
    rows = [row("read bandwidth", "GB/s", limits)]
    for context, seconds in times.items():
        num_bytes = step_bytes(engines, context)
        speeds = [num_bytes / each / 1e9 for each in seconds]
        name = f"1b {'bfloat16' if quantization == 'none' else quantization} decode"
        name += f" at {context:,} tokens" * (context > CONTEXTS[0])
        rows.append(row(f"{name} step", "ms", [1e3 * each for each in seconds]))
        share = median(speeds) / max(limits)  # guests beside this one take from the others
        rows.append(row(f"{name} bytes a step / time", "GB/s", speeds, share))
    return rows


def step_bytes(engines: OpenEngines, context: int) -> int:
    """Bytes that one decode step must read: all weights but the rows of the embedding, and the
    context's keys and values."""
    plan = engines.target.plan
    cached = context * engines.target.kv_bytes_per_block // engines.target.tokens_per_block
    used = {name for op in plan.ops if op.op != "embedding" for name in op.inputs.values()}
    sizes = {
        t.name: int(np.prod(t.shape)) * getattr(torch, t.dtype).itemsize
        for t in plan.tensors
        if t.kind == "weight" and "rotary" not in t.name
    }
    return cached + sum(size for name, size in sizes.items() if name in used)


def bench_help(rounds: int) -> list[Row]:
    """Wall time of `llmctl --help`."""
    command = [str(Path(sys.executable).with_name("llmctl")), "--help"]
    times = []
    for _ in range(rounds + 1):
        began = perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(perf_counter() - began)
    return [row("llmctl --help", "s", times[1:])]


def cpu_name() -> str:
    """The processor's model name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def markdown(rows: list[Row], header: str) -> str:
    """The table for docs/performance."""
    lines = [header, "", "| what | unit | median | minimum | maximum | share of limit |"]
    lines.append("|---|---|---|---|---|---|")
    for item in rows:
        share = "" if item.share_of_limit is None else f"{item.share_of_limit:.0%}"
        numbers = " | ".join(f"{n:.4g}" for n in (item.value, item.minimum, item.maximum))
        lines.append(f"| {item.name} | {item.unit} | {numbers} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of the 1B shape")
    parser.add_argument("--only", choices=["demo", "heads", "1b", "help"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(num_threads())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "help"):
            rows += bench_help(arguments.rounds)
        if arguments.only in (None, "demo"):
            for dtype in ("bfloat16", "float32"):
                rows += bench_demo(Path(folder), dtype, arguments.rounds)
        if arguments.only in (None, "heads"):
            for item in bench_heads(Path(folder), "bfloat16", arguments.rounds):
                rows.append(row(item.name, item.unit, [item.minimum, item.value, item.maximum]))
        if arguments.only in (None, "1b"):
            for quantization in ("none", "fp8"):
                rows += bench_1b(Path(folder), quantization, arguments.steps)
    versions = {name: version(name) for name in ("llmctl", "torch", "transformers", "numpy")}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    date = datetime.now(UTC).date().isoformat()
    machine = f"{cpu_name()}, {num_threads()} threads, {instruction_sets()[0]}"
    command = "python -m scripts.bench.cpu " + " ".join(sys.argv[1:])
    table = markdown(rows, f"`{command.strip()}` · {machine} · {versions} · {date} · {commit}")
    print(table)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "cpu.md").write_text("# CPU backend\n\n" + table)
        shared = {"command": command, "machine": machine, "versions": versions}
        shared |= {"date": date, "commit": commit}
        lines = [json.dumps(asdict(item) | shared) for item in rows]
        (arguments.output / "cpu.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

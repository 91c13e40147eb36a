"""The same load through several systems, alternately: for scripts/compare/hf.py,
scripts/compare/vllm.py and scripts/bench/cpu.py.

A load is a list of tasks, prompts as token ids and how many tokens to write; a system takes one
and returns what it wrote. Every output has exactly the tokens asked for, greedily chosen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.bench.rows import Row, row


@dataclass(frozen=True)
class Task:
    """One request."""

    prompt: list[int]
    num_tokens: int


Outputs = list[list[int]]
System = Callable[[Sequence[Task]], Outputs]


def read_tasks(path: Path, most: int | None = None) -> list[Task]:
    """The rows of a dataset by `llmctl dataset`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Task(row["input_ids"], row["output_tokens"]) for row in rows[:most]]


def num_tokens(tasks: Sequence[Task]) -> int:
    """Tokens that a system writes for a load."""
    return sum(task.num_tokens for task in tasks)


# ---- systems ----


PROGRAM = (sys.executable, "-m", "llmctl.cli.entry")


def llmctl(*arguments: object) -> None:
    """Run the command line as a user would; its progress goes to stderr, its result nowhere."""
    command = [*PROGRAM, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def build_pair(
    target: Path, draft: Path | None, draft_len: int, folder: Path, *options: object
) -> tuple[Path, Path | None]:
    """Engines of two checkpoints; `options` go to both builds."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = folder / "target"
    speculative: list[object] = []
    if draft is not None:
        mode = ["--speculative-decoding-mode", "draft_tokens_external"]
        speculative = [*mode, "--max-draft-len", draft_len]
    llmctl("build", "--checkpoint-dir", target, "--output-dir", engine, *options, *speculative)
    if draft is None:
        return engine, None
    llmctl("build", "--checkpoint-dir", draft, "--output-dir", folder / "draft", *options)
    return engine, folder / "draft"


def open_engines(engine: Path, draft: Path | None, draft_len: int) -> OpenEngines:
    """Loaded engines that keep nothing of earlier prompts."""
    method = DraftEngine(draft, draft_len) if draft is not None else PlainDecoding()
    options = EngineOptions(engine, method, enable_block_reuse=False)
    return OpenEngines(check_engines(options))


def one_by_one(executor: Executor) -> System:
    """llmctl, a request at a time."""

    def run(tasks: Sequence[Task]) -> Outputs:
        return [_answers(executor, [task])[0] for task in tasks]

    return run


def all_at_once(executor: Executor) -> System:
    """llmctl, all requests in flight."""
    return lambda tasks: _answers(executor, tasks)


def _answers(executor: Executor, tasks: Sequence[Task]) -> Outputs:
    requests = [Request(tuple(task.prompt), task.num_tokens) for task in tasks]
    ids = executor.enqueue_requests(requests)
    found: dict[int, list[int]] = {}
    while len(found) < len(ids):
        for response in executor.await_responses():
            if response.result is None:
                sys.exit(f"llmctl failed: {response.error}")
            found[response.request_id] = list(response.result.output_token_ids)
    return [found[request_id] for request_id in ids]


def transformers_system(model: Any, **options: Any) -> System:
    """Hugging Face `generate`, a request at a time; options such as assistant_model."""

    def run(tasks: Sequence[Task]) -> Outputs:
        outputs = []
        for task in tasks:
            ids = torch.tensor([task.prompt], device=model.device)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=task.num_tokens,
                **options,
            )
            outputs.append(out[0, len(task.prompt) :].tolist())
        return outputs

    return run


def load_transformers(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A model that never ends an output early."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    model.generation_config.eos_token_id = None
    return model


# ---- measuring ----


@dataclass
class Measured:
    """tok/s by system and round, and the last outputs."""

    speeds: dict[str, list[float]]
    outputs: dict[str, Outputs]

    def rows(self, pairs: Sequence[tuple[str, str]], prefix: str = "") -> list[Row]:
        """Speeds, and for each (a, b) the ratio a / b round by round with the outputs' likeness."""
        found = [row(f"{prefix}{name}", "tok/s", values) for name, values in self.speeds.items()]
        for above, below in pairs:
            ratios = [a / b for a, b in zip(self.speeds[above], self.speeds[below], strict=True)]
            note = f"{likeness(self.outputs[above], self.outputs[below]):.0%} of tokens alike"
            found.append(row(f"{prefix}{above} / {below}", "ratio", ratios, note=note))
        return found


def take_turns(systems: dict[str, System], tasks: Sequence[Task], rounds: int) -> Measured:
    """Every system in every round, after one that does not count. Exits when an output has another
    length than asked for: its speed would mean something else."""
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    outputs: dict[str, Outputs] = {}
    for index in range(rounds + 1):
        for name, system in systems.items():
            began = perf_counter()
            outputs[name] = system(tasks)
            seconds = perf_counter() - began
            if list(map(len, outputs[name])) != [task.num_tokens for task in tasks]:
                sys.exit(f"{name} wrote outputs of another length than asked for")
            if index:
                speeds[name].append(num_tokens(tasks) / seconds)
    return Measured(speeds, outputs)


def likeness(found: Outputs, wanted: Outputs) -> float:
    """Share of tokens before the first that differs; systems round differently, and one other
    token changes all that follow."""
    alike = total = 0
    for one, other in zip(found, wanted, strict=True):
        pairs = list(zip(one, other, strict=True))
        alike += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    return alike / total


def write_json(path: Path | None, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Rows as JSON lines, each with the facts of the run."""
    if path is not None:
        path.write_text("".join(json.dumps(asdict(item) | facts) + "\n" for item in rows))

"""What the host's Python costs a step, part by part, without a GPU.

    python scripts/profile_host.py [--requests 64,256] [--input 500] [--output 200]
        [--step-ms 7.5] [--mixed-ms 30] [--simulate] [--markdown FILE]

A closed loop of streaming requests runs through the real executor, its round runner and block
tables included; only the device is a stub that knows every token at once. With --simulate it takes
--step-ms a round and --mixed-ms a step with prompts in it, on a clock of its own, and `idle` is
what the device waits for the host between its steps. Parts exclude the parts within them and the
waits for the device; means over the steps of a kind.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from time import perf_counter, sleep, thread_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import llmctl.runtime.loop as loop_module
from llmctl.plugins.cuda.kernel import StepLimits
from llmctl.plugins.cuda.queue import DeviceQueue
from llmctl.plugins.rounds.state import RECORD_COMMITTED, RECORD_EMITTED, RECORD_TOKENS
from llmctl.runtime.config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.core import Request
from llmctl.runtime.cuda_rounds import RING_SLOTS, CudaRoundRunner
from llmctl.runtime.executor import Executor

TOKEN = 77  # what the stub says after everything
KINDS = ("generation", "mixed")
SCHEDULING = ("schedule", "run ahead?")
PARTS = (
    "receive", "schedule", "run ahead?", "pack", "begin", "tables", "collect", "commit", "publish",
    "responses", "post", "stats", "other",
)  # fmt: skip


class Device:
    """Work that takes time and nothing else, in order."""

    def __init__(self, round_s: float, mixed_s: float) -> None:
        self.round_s, self.mixed_s = round_s, mixed_s
        self.free_at = 0.0
        self.idle_s = 0.0  # before the work enqueued last

    def enqueue(self, seconds: float) -> float:
        """When it will be done."""
        now = perf_counter()
        self.idle_s = max(0.0, now - self.free_at)
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at

    def wait(self, until: float) -> None:
        """As a synchronization does: without the interpreter's lock."""
        left = until - perf_counter()
        if left > 0:
            sleep(left)


class Clock:
    """Seconds of each part of the step under way, and of all steps by kind."""

    def __init__(self) -> None:
        self.steps: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._step: dict[str, float] = defaultdict(float)
        self._kind: str | None = None
        self._stack: list[str] = []
        self._since = 0.0

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count calls of owner.name as `part`."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **rest: Any) -> Any:
            self._switch()
            self._stack.append(part)
            try:
                return call(*args, **rest)
            finally:
                self._switch()
                self._stack.pop()

        setattr(owner, name, timed)

    def note_kind(self, kind: str, idle_s: float) -> None:
        """The step under way is one of these."""
        self._kind = kind
        self._step["idle"] = idle_s

    def end_step(self) -> None:
        """The parts so far are those of a step; the time until the next is not counted."""
        if self._kind is not None:
            self.steps[self._kind].append(dict(self._step))
        self._step.clear()
        self._kind = None

    def _switch(self) -> None:
        now = thread_time()
        if self._stack:
            self._step[self._stack[-1]] += now - self._since
        self._since = now


class Pauses:
    """What garbage collections cost, by generation."""

    def __init__(self) -> None:
        self.found: dict[int, list[float]] = defaultdict(list)
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """As gc calls it."""
        if phase == "start":
            self._began = perf_counter()
        else:
            self.found[info["generation"]].append(1e3 * (perf_counter() - self._began))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts."""
        gc.callbacks.append(self)
        try:
            yield
        finally:
            gc.callbacks.remove(self)


class Target:
    """A step runner whose logits say TOKEN."""

    def __init__(self, batch: int, device: Device) -> None:
        self.vocab_size, self.max_seq_len, self.max_batch_size = 128_256, 2560, batch
        self.max_num_tokens, self.max_draft_len, self.tokens_per_block = 2048, 0, 32
        self.max_num_rows = batch
        self.is_asynchronous = True
        self.queue = DeviceQueue("cpu")
        self.logits = torch.empty(0)
        width = self.max_seq_len // self.tokens_per_block
        limits = StepLimits(2048, batch, batch, self.max_seq_len, 0, 32, "float8_e4m3fn")
        tables = torch.zeros((batch, width), dtype=torch.int32)
        self.program = SimpleNamespace(limits=limits, step=SimpleNamespace(block_tables=tables))
        self._device = device

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

    def copy_blocks(self, copies: object) -> None:
        """Nothing to copy."""

    def is_capturable(self) -> bool:
        """Everything is."""
        return True

    def run(self, step: Any) -> Any:
        """Rows that know when they are done."""
        done = self._device.enqueue(self._device.mixed_s)
        return Rows(len(step.logit_rows), done, self._device)


class Rows:
    """So many rows of logits, readable from a moment on."""

    def __init__(self, count: int, done: float, device: Device) -> None:
        self.count, self.done, self.device = count, done, device

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> Rows:
        return self


class Sampling:
    """TOKEN for every row."""

    def argmax(self, logits: Rows) -> np.ndarray:
        """Waits for them, as a copy to the host does."""
        logits.device.wait(logits.done)
        return np.full(len(logits), TOKEN, np.int32)


class Runner(CudaRoundRunner):
    """The CUDA backend's rounds over the stub's arrays; their graphs write records."""

    def __init__(self, target: Any, device: Device) -> None:
        capture = lambda record: SimpleNamespace(replay=record)  # noqa: E731
        super().__init__(target, None, 0, capture)
        self._device = device
        self._done: dict[int, float] = {}

    def _verify(self, shape: object) -> None:
        count, slot = self._num_requests, self._num_started % RING_SLOTS
        committed = self._state.committed[:count].numpy()
        record = self._ring[slot, :count]
        record[:, RECORD_COMMITTED] = committed
        record[:, RECORD_EMITTED] = 1
        record[:, RECORD_TOKENS] = TOKEN
        committed += 1
        self._done[slot] = self._device.enqueue(self._device.round_s)

    def wait(self) -> None:
        """For the oldest round."""
        self._device.wait(self._done[self._in_flight[0].slot])


def instrument(executor: Executor, runner: Runner, target: Target, clock: Clock) -> None:
    """Every part of a step on the clock. The clock's step ends where the worker looks for news."""
    worker: Any = executor._worker
    loop, scheduler = worker._loop, worker.scheduler
    rounds, collect = loop._rounds, runner.collect
    for owner, name, part in (
        (worker, "_receive", "receive"),
        (scheduler, "schedule", "schedule"),
        (rounds, "_length_ahead", "run ahead?"),
        (rounds, "_may_run_ahead", "run ahead?"),
        (loop._verifier, "draw", "commit"),
        (runner, "begin", "begin"),
        (runner, "enqueue", "tables"),
        (rounds, "advance", "commit"),
        (loop._verifier, "commit", "commit"),
        (scheduler, "update", "publish"),
        (worker, "_deliver", "responses"),
        (worker._mailbox, "post", "post"),
        (worker.recorder, "record", "stats"),
        (worker, "_step", "other"),
    ):
        clock.wrap(owner, name, part)
    clock.wrap(worker._sampler.backend, "argmax", "wait")
    clock.wrap(runner, "wait", "wait")
    collect = runner.collect

    def collect_done() -> Any:
        runner.wait()
        return collect()

    runner.collect = collect_done  # type: ignore[method-assign]
    clock.wrap(runner, "collect", "collect")
    step, receive = worker._loop.finish, worker._receive
    device = target._device

    def noted() -> Any:
        report = step()
        clock.note_kind("mixed" if report.batch.context else "generation", device.idle_s)
        return report

    def received() -> bool:
        clock.end_step()
        return bool(receive())

    worker._loop.finish, worker._receive = noted, received


@contextmanager
def packing_timed(clock: Clock) -> Iterator[None]:
    """`pack` is a function of a module."""
    original = loop_module.pack
    clock.wrap(loop_module, "pack", "pack")
    try:
        yield
    finally:
        loop_module.pack = original


def measure(batch: int, arguments: argparse.Namespace, pauses: Pauses) -> Clock:
    """Three loads of `batch` requests in flight, the first of them to warm up."""
    scale = 1e-3 if arguments.simulate else 0.0
    device = Device(arguments.step_ms * scale, arguments.mixed_ms * scale)
    target, clock = Target(batch, device), Clock()
    runner = Runner(target, device)
    config = ExecutorConfig(KvCacheConfig(num_blocks=40_960, enable_block_reuse=arguments.reuse))
    random = np.random.default_rng(0)
    length = arguments.input
    prompts = random.integers(100, 10_000, (3 * batch, length)).tolist()
    requests = [Request(tuple(ids), arguments.output, streaming=True) for ids in prompts]
    args: Any = (target, None, config, Sampling(), runner)
    with packing_timed(clock), Executor(*args) as executor, pauses.watched():
        instrument(executor, runner, target, clock)
        waiting, running = requests[::-1], 0
        while waiting or running:
            while waiting and running < batch:
                executor.enqueue_request(waiting.pop())
                running += 1
            for response in executor.await_responses():
                assert response.result is not None, response.error
                running -= response.result.is_final
            executor.get_latest_iteration_stats()
    return clock


def table(batch: int, clock: Clock, step_ms: float) -> list[str]:
    """Rows of Markdown."""
    rows = []
    for kind in KINDS:
        steps = clock.steps[kind]
        if not steps:
            continue
        means = {part: 1e3 * mean(step.get(part, 0.0) for step in steps) for part in PARTS}
        totals = [1e3 * sum(s.get(part, 0.0) for part in PARTS) for s in steps]
        meds = {part: 1e3 * median(step.get(part, 0.0) for step in steps) for part in PARTS}
        rows += [
            f"| {batch} | {kind} | {part} | {meds[part]:.3f} | {ms:.3f} |"
            for part, ms in means.items()
            if ms
        ]
        scheduling = sum(means[part] for part in SCHEDULING)
        share = f"{scheduling / step_ms:.1%} of {step_ms:g} ms"
        rows.append(f"| {batch} | {kind} | scheduling | {scheduling:.3f} ({share}) |")
        p99 = float(np.percentile(totals, 99))
        spread = f"median {median(totals):.3f}, p99 {p99:.3f}, max {max(totals):.3f}"
        rows.append(
            f"| {batch} | {kind} | all of {len(steps)} steps | {mean(totals):.3f}; {spread} |"
        )
        idle = [1e3 * s.get("idle", 0.0) for s in steps[1:]]
        rows.append(f"| {batch} | {kind} | device idle | {mean(idle):.3f} |")
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="64,256")
    parser.add_argument("--input", type=int, default=500)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=7.5)
    parser.add_argument("--mixed-ms", type=float, default=30.0)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| requests | steps | part | ms a step |", "|---|---|---|---|"]
    for batch in map(int, arguments.requests.split(",")):
        gc.collect()
        pauses = Pauses()
        lines += table(batch, measure(batch, arguments, pauses), arguments.step_ms)
        lines += [
            f"| {batch} | any | garbage collections of generation {generation} | "
            f"{len(times)}; {sum(times):.1f} ms together, max {max(times):.2f} |"
            for generation, times in sorted(pauses.found.items())
        ]
    lines.append(f"\nPython {platform.python_version()}, {' '.join(sys.argv[1:]) or 'defaults'}")
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""CPU time of the host's Python code per step, part by part.

    python -m scripts.profile.host [--requests 64,256] [--input 500] [--output 200]
        [--step-ms 4,7.5] [--simulate] [--mixed-ms 30] [--reuse]
    python -m scripts.profile.host --engine-dir DIR ...

A closed loop of streaming requests runs through the real executor, its round runner and block
tables included. Without an engine the device is a stub (`host_stub.py`) that knows every token at
once; with --simulate it takes --step-ms a round and --mixed-ms a step with prompts in it, and the
table shows how long it was idle before each. Of an engine on a GPU nothing is simulated.

A part's time is what the executor's thread computed (its CPU time), without the parts within it and
without waiting for the device; `scheduling` is what decides who runs next. The share is that of a
round of --step-ms, one for each number of requests.
"""

from __future__ import annotations

import argparse
import gc
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import llmctl.runtime.loop as loop_module
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from llmctl.runtime.step import pack
from scripts.profile.host_stub import StubDevice, StubRunner, StubSampling, StubTarget

Steps = list[dict[str, float]]  # seconds of each part
KINDS = {"generation": "rounds", "mixed": "steps with prompts"}
WAIT = "wait"
SCHEDULING = ("schedule", "run ahead?")
PARTS = (
    "receive", "schedule", "run ahead?", "pack", "launch", "begin", "tables", "collect", "draw",
    "commit", "publish", "deliver", "post", "statistics", "other",
)  # fmt: skip


class Clock:
    """Seconds of each part of the step under way, and of all steps by kind."""

    def __init__(self) -> None:
        self.steps: dict[str, Steps] = defaultdict(list)
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
        """The parts since the last end are those of one step."""
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
    """What garbage collections cost, by generation, in milliseconds."""

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


def instrument(executor: Executor, clock: Clock, device: StubDevice | None) -> None:
    """Every part of a step on the clock. A step of the clock ends where the worker looks for news:
    what is delivered late counts for the step that it delays."""
    worker: Any = executor._worker
    loop, rounds, backend = worker._loop, worker._loop._rounds, worker._sampler.backend
    runner = rounds._runner
    for owner, name, part in (
        (worker, "_receive", "receive"),
        (worker.scheduler, "schedule", "schedule"),
        (rounds, "_length_ahead", "run ahead?"),
        (rounds, "_may_run_ahead", "run ahead?"),
        (worker._target, "run", "launch"),
        (runner, "begin", "begin"),
        (runner, "enqueue", "tables"),
        (rounds, "advance", "commit"),
        (loop._verifier, "draw", "draw"),
        (loop._verifier, "commit", "commit"),
        (worker.scheduler, "update", "publish"),
        (worker._delivery, "flush", "deliver"),
        (worker._mailbox, "post", "post"),
        (worker.recorder, "look", "statistics"),
        (worker.recorder, "record", "statistics"),
        (worker, "_step", "other"),
        (backend if device is not None else backend._queue, "to_host", WAIT),
    ):
        clock.wrap(owner, name, part)
    collect, wait = runner.collect, getattr(runner, "wait_for_oldest", None)

    def collected() -> Any:
        waited()
        return collect()

    def waited() -> None:
        runner._in_flight[0].ended.synchronize() if wait is None else wait()

    holder: Any = argparse.Namespace(wait=waited)
    clock.wrap(holder, "wait", WAIT)
    waited = holder.wait
    runner.collect = collected
    clock.wrap(runner, "collect", "collect")
    finish, receive = loop.finish, worker._receive

    def finished() -> Any:
        report = finish()
        idle_s = device.idle_s if device is not None else 0.0
        clock.note_kind("mixed" if report.batch.context else "generation", idle_s)
        return report

    def received() -> bool:
        clock.end_step()
        return bool(receive())

    loop.finish, worker._receive = finished, received


@contextmanager
def packing_timed(clock: Clock) -> Iterator[None]:
    """`pack` is a function of a module."""
    with patch.object(loop_module, "pack", pack):
        clock.wrap(loop_module, "pack", "pack")
        yield


def stub_executor(batch: int, device: StubDevice, has_reuse: bool) -> Executor:
    """An executor of `batch` requests over a device that is none."""
    target: Any = StubTarget(batch, device)
    sampling: Any = StubSampling()
    config = ExecutorConfig(KvCacheConfig(num_blocks=40_960, enable_block_reuse=has_reuse))
    return Executor(target, None, config, sampling, StubRunner(target, device))


def run_load(executor: Executor, batch: int, requests: list[Request]) -> None:
    """All of them, `batch` in flight, as `llmctl bench throughput` does."""
    waiting, running = requests[::-1], 0
    while waiting or running:
        while waiting and running < batch:
            executor.enqueue_request(waiting.pop())
            running += 1
        for response in executor.await_responses():
            assert response.result is not None, response.error
            running -= response.result.is_final
        executor.get_latest_iteration_stats()


def measure(
    batch: int, step_ms: float, arguments: argparse.Namespace, engines: OpenEngines | None
) -> list[str]:
    """Rows of the table for so many requests."""
    device = None
    if engines is None:
        scale = 1e-3 if arguments.simulate else 0.0
        device = StubDevice(step_ms * scale, arguments.mixed_ms * scale)
    random = np.random.default_rng(0)
    prompts = random.integers(100, 10_000, (3 * batch, arguments.input)).tolist()
    requests = [Request(tuple(ids), arguments.output, streaming=True) for ids in prompts]
    clock, pauses = Clock(), Pauses()
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(packing_timed(clock))
        if device is not None:
            executor = stub_executor(batch, device, arguments.reuse)
        else:
            assert engines is not None
            executor = engines.executor()
        stack.enter_context(executor)
        stack.enter_context(pauses.watched())
        instrument(executor, clock, device)
        began = perf_counter()
        run_load(executor, batch, requests)
        seconds = perf_counter() - began
    has_idle = device is not None  # a GPU's is not known here
    tables = [table(batch, kind, clock.steps[kind], step_ms, has_idle) for kind in KINDS]
    rows = [row for part in tables for row in part]
    tokens_s = len(requests) * arguments.output / seconds
    rows.append(f"| {batch} | all | tokens/s, for what it is worth | {tokens_s:,.0f} | |")
    for generation, times in sorted(pauses.found.items()):
        name = f"{len(times)} garbage collections of generation {generation}"
        rows.append(f"| {batch} | all | {name}, max | {max(times):.2f} | |")
    return rows


def table(batch: int, kind: str, steps: Steps, step_ms: float, has_idle: bool) -> list[str]:
    """Rows of Markdown for one kind of step."""
    if not steps:
        return []
    start = f"| {batch} | {KINDS[kind]} |"
    rows, shares = [], dict.fromkeys(PARTS, 0.0)
    for part in PARTS:
        times = [1e3 * step.get(part, 0.0) for step in steps]
        if any(times):
            shares[part] = mean(times)
            rows.append(f"{start} {part} | {median(times):.3f} | {mean(times):.3f} |")
    scheduling = [1e3 * sum(step.get(part, 0.0) for part in SCHEDULING) for step in steps]
    share = f"{mean(scheduling) / step_ms:.1%} of {step_ms:g} ms"
    rows.append(
        f"{start} **scheduling** | {median(scheduling):.3f} | {mean(scheduling):.3f}, {share} |"
    )
    totals = [1e3 * sum(step.get(part, 0.0) for part in PARTS) for step in steps]
    p99 = float(np.percentile(totals, 99))
    rows.append(
        f"{start} **all** of {len(steps)} steps | {median(totals):.3f} | {mean(totals):.3f}, "
        f"p99 {p99:.2f}, max {max(totals):.2f} |"
    )
    idle = [1e3 * step["idle"] for step in steps[1:]]
    if has_idle and idle:
        rows.append(f"{start} device idle before | {median(idle):.3f} | {mean(idle):.3f} |")
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="64,256")
    parser.add_argument("--input", type=int, default=500)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--step-ms", default="4,7.5")
    parser.add_argument("--mixed-ms", type=float, default=30.0)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--engine-dir", type=Path)
    arguments = parser.parse_args()
    batches, steps_ms = arguments.requests.split(","), arguments.step_ms.split(",")
    if len(batches) != len(steps_ms):
        parser.error(
            f"--step-ms {arguments.step_ms}: one for each number of --requests {arguments.requests}"
        )
    engines = None
    if arguments.engine_dir is not None:
        options = EngineOptions(arguments.engine_dir, enable_block_reuse=arguments.reuse)
        engines = OpenEngines(check_engines(options))
    else:
        torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, {platform.machine()}\n")
    print("| requests | steps | part | median ms | mean ms |\n|---|---|---|---|---|")
    for batch, step_ms in zip(map(int, batches), map(float, steps_ms), strict=True):
        print("\n".join(measure(batch, step_ms, arguments, engines)), flush=True)


if __name__ == "__main__":
    main()

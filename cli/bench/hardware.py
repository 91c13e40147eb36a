"""The minimum time of a step on this machine, from the bytes it must read from memory.

A step that only generates reads the target's weights and the KV cache of its requests once, and the
draft engine's as often as it drafts. The minimum is those bytes divided by a read bandwidth
measured in the same run; its fraction of the measured time shows how much could still be gained.
Where several ranks share a memory, as on a CPU, the bytes of all count; else those of one, since
each has a memory of its own. Large batches can be bound by arithmetic instead, and ranks have to
meet, which this limit does not cover.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmctl.cli.bench.records import StepRecord
from llmctl.cli.inspect.cost import Step, op_bytes
from llmctl.runtime.engines.engine import kv_bytes_per_block

if TYPE_CHECKING:
    from llmctl.builder.engine_format import Plan
    from llmctl.plugins.backends.cuda.read_rate import ReadRate
    from llmctl.runtime.engines.engine import Engine
    from llmctl.runtime.engines.opening import OpenedEngines

MOST_BYTES = 1 << 30  # of a buffer that is read to measure; far larger than a GPU's caches
LEAST_BYTES = 1 << 20
NUM_READS = 9
EXCEEDED = (
    "the run was faster than this limit: its bandwidth was measured too low, and will be measured "
    "again by the next run"
)


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that steps read, for all draft engines together; 0 if there are none."""

    target_weights: int
    draft_weights: int
    target_kv_per_block: int
    draft_kv_per_block: int

    @classmethod
    def of(cls, opened: OpenedEngines) -> Reads:
        """The figures of loaded engines."""

        def all_ranks(engine: Engine, num_bytes: int) -> int:
            return num_bytes * (engine.config.num_ranks if opened.has_one_memory else 1)

        target, drafts = opened.target, opened.draft_engines
        return cls(
            all_ranks(target, weight_reads(target.plan)),
            sum(all_ranks(engine, weight_reads(engine.plan)) for engine in drafts),
            all_ranks(target, kv_bytes_per_block(target.plan)),
            sum(all_ranks(engine, kv_bytes_per_block(engine.plan)) for engine in drafts),
        )

    def step_bytes(self, step: StepRecord) -> int:
        """Bytes of a step that only generates; whole KV blocks of its requests are counted."""
        # A draft engine computes a level of a tree at once.
        num_runs = max((item.draft_depth for item in step.rounds), default=0)
        target = self.target_weights + step.kv_used_blocks * self.target_kv_per_block
        draft = self.draft_weights + step.kv_used_blocks * self.draft_kv_per_block
        return target + num_runs * draft


def processor_name() -> str:
    """The CPU's model name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def weight_reads(plan: Plan) -> int:
    """Weight bytes that a pass over one token reads."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    step = Step(tokens=1, context_len=0)
    return sum(op_bytes(op, tensors, plan.kv_cache, step).weights for op in plan.ops)


def measure_cpu(num_bytes: int, num_ranks: int = 1) -> ReadRate:
    """What the threads of all ranks get: the fastest of several reads of a buffer
    as large as what a step reads, so that small models are compared with the caches that they fit
    into."""
    from llmctl.plugins.backends.cpu.binding import num_threads, set_num_threads
    from llmctl.plugins.backends.cuda.read_rate import ReadRate

    own = num_threads()
    set_num_threads(own * num_ranks)
    try:
        rate = _measure_cpu(num_bytes)
    finally:
        set_num_threads(own)
    return ReadRate(rate, f"fastest of {NUM_READS} reads by {own * num_ranks} threads")


def _measure_cpu(num_bytes: int) -> float:
    import numpy as np

    from llmctl.plugins.backends.cpu.binding import load_kernels

    count = min(max(num_bytes, LEAST_BYTES), MOST_BYTES) // 4
    buffer = np.ones(count, np.float32)
    rates = []
    for _ in range(NUM_READS):
        began = perf_counter()
        done = load_kernels().llmctl_measure_read(buffer.ctypes.data, len(buffer))
        rates.append(done / (perf_counter() - began))
    return float(max(rates))


def limit_json(
    reads: Reads, rate: ReadRate | None, steps: Sequence[StepRecord]
) -> dict[str, Any] | None:
    """The limit over all steps that only generate; None without such steps or a rate.

    A run that was faster than the limit shows that the bandwidth was measured too low: then there
    is no share, and `is_exceeded` is true.
    """
    steps = [step for step in steps if step.rounds and not step.context_requests]
    if rate is None or not steps:
        return None
    floors_ms = [reads.step_bytes(step) / rate.bytes_per_s * 1e3 for step in steps]
    # If the device ran ahead of the host, the time of a step is that of the device.
    times_ms = [max(step.step_ms, step.draft_ms + step.verify_ms) for step in steps]
    share = sum(floors_ms) / sum(times_ms)
    return {
        "read_bandwidth_gb_s": rate.bytes_per_s / 1e9,
        "read_measurement": rate.measurement,
        "read_per_step_mb": sum(map(reads.step_bytes, steps)) / len(steps) / 1e6,
        "floor_per_step_ms": sum(floors_ms) / len(steps),
        "measured_per_step_ms": sum(times_ms) / len(steps),
        "share_of_limit": share if share <= 1 else None,
        "is_exceeded": share > 1,
    }

"""How long a step is predicted to take: by what it reads, and on several ranks by their meetings.

The models are those of cli/gpus.py (one rank) and cli/rank_speed.py (several GPUs). What ranks of a
CPU pay for their meetings is not known; they share what the memory reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmctl.builder.engine_format import EngineConfig, Plan
from llmctl.cli.gpus import (
    CPU_STEP_SHARE,
    READ_SHARE,
    Gpu,
    default_gpu,
    effective_read_bytes_s,
    find_gpu,
    present_gpu,
    shares_of,
)
from llmctl.cli.inspect.cost import DECODE, Step, meetings, step_bytes
from llmctl.cli.rank_speed import RankStep, head_time, rank_time, waits_of
from llmctl.errors import BadConfig
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.schemes.table import scheme_of_algo


@dataclass(frozen=True, slots=True)
class Prediction:
    """memory: whose. read_bytes_s: bytes a second that a rank's step gets, None where nothing is
    known. meetings_s: what all meetings of ranks take, at least and at most."""

    read_bytes: int
    memory: str | None = None
    read_bytes_s: float | None = None
    num_meetings: int = 0
    meetings_s: tuple[float, float] = (0.0, 0.0)

    @property
    def bounds_s(self) -> tuple[float, float] | None:
        """The step's time, at least and at most; the same twice for one rank."""
        if self.read_bytes_s is None:
            return None
        alone = self.read_bytes / self.read_bytes_s
        return alone + self.meetings_s[0], alone + self.meetings_s[1]


def predict_step(
    config: EngineConfig, plan: Plan, step: Step, gpu: str | None, read_gb_s: float | None
) -> dict[str, Any]:
    """What `inspect` says of one step: what a rank reads and how long that takes; None for times
    where nothing is known of the memory (cpu engines, unless read_gb_s is given).

    Raises BadConfig for an unknown GPU, or one for an engine that runs on none.
    """
    device = find_device(config, gpu, read_gb_s)
    if device is None:
        found = _predict_on_cpu(config, plan, step, read_gb_s)
    else:
        found = predict_on_gpu(config, plan, step, device)
    bounds = found.bounds_s
    return {
        "tokens": step.tokens,
        "context_len": step.context_len,
        "read_bytes": found.read_bytes,
        "memory": found.memory,
        "read_bytes_s": found.read_bytes_s,
        "predicted_ms": None if bounds is None else 1e3 * sum(bounds) / 2,
        "num_meetings": found.num_meetings,
        "meetings_ms": [1e3 * bound for bound in found.meetings_s],
    }


def find_device(config: EngineConfig, gpu: str | None, read_gb_s: float | None) -> Gpu | None:
    """The GPU to predict for; None for an engine that runs on none. read_gb_s: its memory's, else
    that of the GPU of this name, of the one here, or of one that the engine was compiled for.

    Raises what `predict_step` raises."""
    if read_gb_s is not None and gpu is not None:
        raise BadConfig("--gpu and --read-bandwidth are both given; one of them is wanted")
    if not BACKENDS[config.backend].on_gpu:
        if gpu is not None:
            raise BadConfig(
                f"--gpu {gpu}: this engine runs on the cpu",
                fix="give what its memory reads: --read-bandwidth GB/S",
            )
        return None
    found: Gpu | None = find_gpu(gpu) if gpu is not None else None
    if found is None and read_gb_s is None:
        found = present_gpu()
    if found is None:
        found = default_gpu((config.compute_capability or "").split(","))
    if read_gb_s is not None:
        found = replace(
            found, name=f"{read_gb_s:g} GB/s", read_bytes_s=read_gb_s * 1e9 / READ_SHARE
        )
    return found


def _predict_on_cpu(
    config: EngineConfig, plan: Plan, step: Step, read_gb_s: float | None
) -> Prediction:
    speed = None if read_gb_s is None else read_gb_s * 1e9 * CPU_STEP_SHARE / config.num_ranks
    name = None if read_gb_s is None else f"{read_gb_s:g} GB/s"
    return Prediction(step_bytes(plan, step), name, speed, len(meetings(plan, step)))


def predict_on_gpu(config: EngineConfig, plan: Plan, step: Step, gpu: Gpu) -> Prediction:
    """The step of an engine on as many such GPUs as it has ranks."""
    read, ranks = step_bytes(plan, step), config.num_ranks
    scheme = scheme_of_algo(config.pretrained_config["quantization"]["quant_algo"])
    if ranks == 1:
        return Prediction(read, gpu.name, effective_read_bytes_s(gpu, read, shares_of(scheme)))
    met = meetings(plan, step)
    layers = int(config.pretrained_config["num_hidden_layers"])
    time = rank_time(gpu, RankStep(ranks, layers, read, met), waits_of(scheme))
    if time is None:
        return Prediction(read, gpu.name, None, len(met))
    return Prediction(read, gpu.name, read / time.alone_s, len(met), (time.least_s, time.most_s))


def predict_head(config: EngineConfig, plan: Plan, name: str, gpu: Gpu | None) -> Prediction:
    """A step of one row of a draft head. Its time is known of heads that do not attend, on GPUs."""
    read, met = step_bytes(plan, DECODE, name), meetings(plan, DECODE, name)
    if gpu is None or plan.heads[name].cache:
        return Prediction(read, num_meetings=len(met))
    time = head_time(gpu, config.num_ranks, read, met)
    if time is None:
        return Prediction(read, num_meetings=len(met))
    return Prediction(read, gpu.name, read / time.alone_s, len(met), (time.least_s, time.most_s))


def fastest(steps: Mapping[int, Sequence[float]]) -> int:
    """Of the bounds of a step by ranks: the fewest ranks within 2 % of the shortest, by the middle
    of the bounds."""
    middles = {ranks: sum(bounds) / 2 for ranks, bounds in steps.items()}
    least = min(middles.values())
    return min(ranks for ranks, middle in middles.items() if middle <= 1.02 * least)

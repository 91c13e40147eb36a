"""Whole requests of the demo target on a fake device: steps that the host controls, and rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.stats.counters import SpeculationStats
from support.cuda import launch_sampling, open_on_fake_device
from support.e2e import KINDS, Outputs, run_all
from support.rounds_by_reference import run_rounds_by_reference


class DeviceRun(NamedTuple):
    """What came of some requests."""

    method: DraftMethod
    draft_len: int
    stats: SpeculationStats
    num_rounds: int  # led by the device


def _sampling(queue: DeviceQueue) -> CudaSampling:
    return CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])


def _beside(method: DraftMethod, queue: DeviceQueue) -> dict[str, CudaEngine]:
    """The engines that a method opens besides the target."""
    return {role: open_on_fake_device(path, queue)[0] for role, path in method.engines.items()}


def accepted_by_host(
    engine: Path, method: DraftMethod, requests: list[Request], plain: Outputs
) -> int:
    """Drafts that were accepted when the host controlled every step. The text is asserted to be
    that of plain decoding, and graphs to have been replayed."""
    queue = DeviceQueue("cpu")
    target, capture = open_on_fake_device(engine, queue)
    engines = _beside(method, queue)
    configs = {role: opened.config for role, opened in engines.items()}
    engines["target"] = target
    drafter = method.make_drafter(engines, method.check(target.config, configs))
    config = ExecutorConfig(KvCacheConfig(num_blocks=300))
    with Executor(target, drafter, config, _sampling(queue)) as executor:
        assert run_all(executor, requests) == plain
        stats = executor.get_speculation_stats()
    assert sum(graph.num_replays for graph in capture.graphs) > 1
    return stats.accepted_tokens


def never_need_the_host(requests: list[Request]) -> list[int]:
    """Indices of the requests whose rounds a device can lead."""
    return [
        index
        for index, request in enumerate(requests)
        if index % len(KINDS) != 2
        and not request.output_config.return_log_probs
        and request.max_draft_len is None
    ]


def rounds_on_device(
    engine: Path,
    cases: Iterable[tuple[DraftMethod, list[int]]],
    requests: list[Request],
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[DeviceRun]:
    """Some of the requests after others, with rounds where no host is needed. The text is asserted
    to be that of plain decoding."""
    run_rounds_by_reference(monkeypatch)
    queue = DeviceQueue("cpu")
    target, capture = open_on_fake_device(engine, queue)
    for method, asked in cases:
        engines = _beside(method, queue)
        draft_len = method.check(target.config, {role: e.config for role, e in engines.items()})
        engines["target"] = target
        drafter = method.make_drafter(engines, draft_len)
        on_device = method.make_device_drafter(engines, draft_len, drafter)
        assert on_device is not None
        runner = CudaRoundRunner(target, on_device, capture)
        config = ExecutorConfig(KvCacheConfig(num_blocks=300), check_invariants=True)
        with Executor(target, drafter, config, _sampling(queue), runner) as executor:
            wanted = [plain[index] for index in asked]
            assert run_all(executor, [requests[index] for index in asked]) == wanted
            stats = executor.get_speculation_stats()
        yield DeviceRun(method, draft_len, stats, runner._num_started)

"""What another rank with a device of its own does of a run: steps and rounds by commands, with the
CPU's arithmetic. Its cache and records are rank 0's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda import (
    FakeCapture,
    launch_sampling,
    open_on_fake_device,
)
from support.e2e import TREE_LEN, DemoPair, Outputs, run_all
from support.fake_device_runs import never_need_the_host
from support.other_rank import OtherRank
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.leading_cuda import LeadingCudaEngine
from llmctl.runtime.ranks.commands import ROUNDS
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.following import FollowingRounds, LeadingRounds, describe


def test_another_rank_goes_through_the_same_rounds(
    demo: DemoPair,
    requests: list[Request],
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rounds, and host-led steps between them: prompts, penalties, log-probabilities."""
    run_rounds_by_reference(monkeypatch)
    queue, capture = DeviceQueue("cpu"), FakeCapture()
    folder = demo.engine("target-fp8")
    other, _ = open_on_fake_device(folder, queue)
    following = FollowingRounds({"target": other}, capture)
    leader: Any = OtherRank({"target": other, ROUNDS: following})
    make = partial(LeadingCudaEngine, leader, "target")
    engine, _ = open_on_fake_device(folder, queue, make)
    method, engines = PlainDecoding(), {"target": engine}
    drafter = method.make_drafter(engines, 0)
    on_device = method.make_device_drafter(engines, 0, drafter)
    assert on_device is not None
    own = CudaRoundRunner(engine, on_device, FakeCapture())
    described = describe(on_device)
    assert described is not None
    runner = LeadingRounds(leader, own, described, ())
    config = ExecutorConfig(KvCacheConfig(num_blocks=300), check_invariants=True)
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    free = [replace(request, max_draft_len=None) for request in requests]
    with Executor(engine, drafter, config, sampling, runner) as executor:
        assert run_all(executor, free) == plain
        led = never_need_the_host(free)
        assert run_all(executor, [free[i] for i in led]) == [plain[i] for i in led]
    theirs = following._own
    assert own._num_started == theirs._num_started > 10
    assert not theirs._in_flight
    assert np.array_equal(own._ring, theirs._ring) and own._ring.any()
    caches = [each._paged[""].tensor.view(torch.uint8) for each in (engine, other)]
    assert torch.equal(*caches) and caches[0].any()
    assert {"open", "prepare", "begin", "enqueue", "run", "allocate_kv_cache"} <= set(leader.calls)


def test_rank_0_drafts_with_its_heads_while_another_rank_follows_its_steps(
    demo: DemoPair, requests: list[Request], plain: Outputs
) -> None:
    """Heads are no command: the other rank's cache of the target is rank 0's all the same."""
    queue, folder = DeviceQueue("cpu"), demo.engine("target-fp8-medusa")
    other, _ = open_on_fake_device(folder, queue)
    leader: Any = OtherRank({"target": other})
    make = partial(LeadingCudaEngine, leader, "target")
    engine, _ = open_on_fake_device(folder, queue, make)
    method, engines = Medusa(draft_len=TREE_LEN), {"target": engine}
    drafter = method.make_drafter(engines, TREE_LEN)
    assert describe(method.make_device_drafter(engines, TREE_LEN, drafter)) is None
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    config = ExecutorConfig(KvCacheConfig(num_blocks=300), check_invariants=True)
    with Executor(engine, drafter, config, sampling) as executor:
        assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().accepted_tokens > 0
    caches = [each._paged[""].tensor.view(torch.uint8) for each in (engine, other)]
    assert torch.equal(*caches) and caches[0].any()
    assert {"run", "compact", "allocate_kv_cache"} <= set(leader.calls)

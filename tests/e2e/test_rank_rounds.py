"""What another rank with a device of its own does of a run: steps and rounds by commands, with the
CPU's arithmetic. Its cache and records are rank 0's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.leading_cuda import LeadingCudaEngine
from llmctl.runtime.ranks.commands import ROUNDS
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.following import FollowingRounds, LeadingRounds


@pytest.fixture(scope="module")
def engine_of(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo target with the heads of a mode, or none."""

    def built(mode: str) -> Path:
        if mode != "redrafter":
            return demo.engine("target-fp8-medusa" if mode else "target-fp8")
        folder: Path = tmp_path_factory.mktemp("redrafter") / "engine"
        demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir", demo.quantized("target"),
                    "--output-dir", folder, "--max-batch-size", 16, "--max-seq-len", 1024,
                    "--speculative-decoding-mode", mode, "--draft-model-dir",
                    demo.examples / "demo-redrafter", "--redrafter-num-beams", 3,
                    "--redrafter-draft-len-per-beam", 3)  # fmt: skip
        return folder

    return built


METHODS: dict[str, tuple[DraftMethod, int]] = {
    "": (PlainDecoding(), 0),
    "medusa": (Medusa(draft_len=TREE_LEN), TREE_LEN),
    "redrafter": (RecurrentDrafting(None, 3), 9),
}


@pytest.mark.parametrize("mode", METHODS)
def test_another_rank_goes_through_the_same_rounds(
    engine_of: Callable[[str], Path],
    requests: list[Request],
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """With rounds, and host-led steps between them: prompts, penalties, log-probabilities. Heads
    draft alike on both in rounds, and between them on rank 0 alone."""
    run_rounds_by_reference(monkeypatch)
    queue, capture = DeviceQueue("cpu"), FakeCapture()
    folder, (method, draft_len) = engine_of(mode), METHODS[mode]
    other, _ = open_on_fake_device(folder, queue)
    following = FollowingRounds({"target": other}, capture)
    leader: Any = OtherRank({"target": other, ROUNDS: following})
    make = partial(LeadingCudaEngine, leader, "target")
    engine, _ = open_on_fake_device(folder, queue, make)
    engines = {"target": engine}
    drafter = method.make_drafter(engines, draft_len)
    on_device = method.make_device_drafter(engines, draft_len, drafter)
    assert on_device is not None
    own = CudaRoundRunner(engine, on_device, FakeCapture())
    followed = on_device.followed()
    assert followed is not None
    runner = LeadingRounds(leader, own, followed, ())
    config = ExecutorConfig(KvCacheConfig(num_blocks=300), check_invariants=True)
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    # The kernels of heads are interpreted: with half of the requests, one of each kind and length.
    free = [replace(each, max_draft_len=None) for each in requests[: 12 if mode else None]]
    with Executor(engine, drafter, config, sampling, runner) as executor:
        assert run_all(executor, free) == plain[: len(free)]
        led = never_need_the_host(free)
        assert run_all(executor, [free[i] for i in led]) == [plain[i] for i in led]
        assert (executor.get_speculation_stats().accepted_tokens > 0) == bool(mode)
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
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    config = ExecutorConfig(KvCacheConfig(num_blocks=300), check_invariants=True)
    with Executor(engine, drafter, config, sampling) as executor:
        assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().accepted_tokens > 0
    caches = [each._paged[""].tensor.view(torch.uint8) for each in (engine, other)]
    assert torch.equal(*caches) and caches[0].any()
    assert {"run", "compact", "allocate_kv_cache"} <= set(leader.calls)

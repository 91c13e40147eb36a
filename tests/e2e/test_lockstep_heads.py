"""Rounds of a target of two ranks with draft heads, all on one device, with the CPU's arithmetic:
drafts and tokens of one rank, whether logits are gathered or ranks list what is likeliest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cuda import FakeCapture, launch_sampling, open_on_fake_device
from support.e2e import DemoPair, Outputs, run_all
from support.lockstep import open_in_lockstep
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner

METHODS: dict[str, tuple[DraftMethod, int, tuple[object, ...]]] = {
    "medusa": (Medusa(draft_len=9), 9, ()),
    "redrafter": (
        RecurrentDrafting(None, 3),
        9,
        ("--redrafter-num-beams", 3, "--redrafter-draft-len-per-beam", 3),
    ),
}
Drafted = tuple[Outputs, list[tuple[int, int]]]


@pytest.fixture(scope="module")
def build(demo: DemoPair, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The demo target with its heads of a mode, of so many ranks with one text."""
    folder = tmp_path_factory.mktemp("lockstep-heads")

    def made(mode: str, ranks: int) -> Path:
        engine = folder / f"{mode}-{ranks}"
        if not engine.exists():
            demo.llmctl("build", "--backend", "cpu", "--checkpoint-dir",
                        demo.examples / "demo-target", "--tp-invariant", "--output-dir", engine,
                        "--max-batch-size", 16, "--max-seq-len", 1024, "--tp-size", ranks,
                        "--speculative-decoding-mode", mode, *METHODS[mode][2],
                        "--draft-model-dir", demo.examples / f"demo-{mode}")  # fmt: skip
        return engine

    return made


def drafted(target: CudaEngine, queue: DeviceQueue, mode: str, requests: list[Request]) -> Drafted:
    """(outputs, the drafts and accepted ones of each request), one after the other, then all."""
    method, draft_len, _ = METHODS[mode]
    engines = {"target": target}
    drafter = method.make_drafter(engines, draft_len)
    on_device = method.make_device_drafter(engines, draft_len, drafter)
    assert on_device is not None
    runner = CudaRoundRunner(target, on_device, FakeCapture())
    sampling = CudaSampling(queue, lambda launches: [launch_sampling(item) for item in launches])
    config = ExecutorConfig(KvCacheConfig(num_blocks=200))
    outputs, counts = [], []
    with Executor(target, drafter, config, sampling, runner) as executor:
        for request in requests:
            outputs += run_all(executor, [request])
            stats = executor.get_speculation_stats()
            counts.append((stats.draft_tokens, stats.accepted_tokens))
        assert run_all(executor, requests) == outputs, "together"
    assert runner._num_started > 10, "the device leads"
    return outputs, counts


@pytest.mark.parametrize("mode", METHODS)
def test_heads_of_ranks_draft_as_those_of_one(
    demo: DemoPair,
    build: Callable[[str, int], Path],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """Of requests for rounds and for steps that the host leads between them."""
    run_rounds_by_reference(monkeypatch)
    queue, asked = DeviceQueue("cpu"), requests[:7]
    wanted = drafted(open_on_fake_device(build(mode, 1), queue)[0], queue, mode, asked)
    assert wanted[1][-1][1] > 15, "drafts are accepted"
    for is_apart in (False, True):
        engine, _ = open_in_lockstep(build(mode, 2), queue, has_peers=is_apart)
        assert drafted(engine, queue, mode, asked) == wanted, is_apart

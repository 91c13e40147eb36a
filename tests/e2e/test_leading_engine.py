"""StepRunner is where ranks join: an engine that leads others needs nothing of scheduler and loop.

The leader hands every call on as a command; a follower that has no scheduler, requests or drafter
executes the commands and computes the same bits.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from support.e2e import DRAFT_LEN, DemoPair, PromptMaker, run_all

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.engines.cpu_engine import CpuEngine
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.step import StepRunner

FACTS = list(StepRunner.__annotations__)
COMMANDS = ("allocate_kv_cache", "allocate_host_blocks", "copy_blocks", "run", "compact")


class LeadingEngine:
    """A StepRunner that writes down what is asked of it; it has nothing else of its engine."""

    def __init__(self, engine: StepRunner) -> None:
        self.stream: list[bytes] = []
        for name in FACTS:
            setattr(self, name, getattr(engine, name))
        for name in COMMANDS:
            setattr(self, name, self._lead(name, getattr(engine, name)))

    def _lead(self, name: str, method: Any) -> Any:
        def lead(*arguments: Any) -> Any:
            self.stream.append(pickle.dumps((name, arguments)))
            return method(*arguments)

        return lead


def open_engine(folder: Path) -> CpuEngine:
    engine = open_cpu_engine(folder)
    assert isinstance(engine, CpuEngine)
    return engine


def test_followers_need_the_commands_of_a_step_runner_alone(
    demo: DemoPair, prompts: PromptMaker
) -> None:
    folder = demo.engine("target-fp8")
    kinds = (SamplingConfig(), SamplingConfig(temperature=0.8, top_k=0, seed=5))
    requests = [Request(p, 12, kinds[i % 2], end_id=1) for i, p in enumerate(prompts(12))]
    with demo.executor("target-fp8") as executor:
        wanted = run_all(executor, requests)
    engine = open_engine(folder)
    leader = LeadingEngine(engine)
    config = ExecutorConfig(KvCacheConfig(num_blocks=300))
    with Executor(leader, NgramDrafter(DRAFT_LEN, 3), config, CpuSampling()) as executor:
        assert run_all(executor, requests) == wanted
    follower = open_engine(folder)
    for command in leader.stream:
        name, arguments = pickle.loads(command)
        getattr(follower, name)(*arguments)
    assert sum(b"run" in command[:60] for command in leader.stream) > 5
    found, expected = (e._cache.tensor.view(torch.uint8) for e in (follower, engine))
    assert torch.equal(found, expected) and expected.any()
    assert torch.equal(follower.output("logits"), engine.output("logits"))

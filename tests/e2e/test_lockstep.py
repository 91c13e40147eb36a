"""All ranks of the demo target in lockstep on one device, with the CPU's arithmetic: the tokens of
ranks that are processes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.cuda import FakeCapture, launch_sampling, open_on_fake_device
from support.e2e import DRAFT_LEN, DemoPair, Outputs, PromptMaker, run_all
from support.lockstep import open_in_lockstep

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig

TARGET = "target-fp8-tp2"
KINDS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=3 << 40),
    SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2),
)


@contextmanager
def lockstep_executor(demo: DemoPair, draft: str | None) -> Iterator[tuple[Executor, FakeCapture]]:
    """(the executor, the target's graphs)."""
    queue = DeviceQueue("cpu")

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)

    target, capture = open_in_lockstep(demo.engine(TARGET), queue)
    drafter: Drafter | None = None
    if draft == "ngram":
        drafter = NgramDrafter(DRAFT_LEN, 3)
    elif draft is not None:
        drafter = DraftEngineDrafter(open_on_fake_device(demo.engine(draft), queue)[0], DRAFT_LEN)
    config = ExecutorConfig(KvCacheConfig(num_blocks=200))
    with Executor(target, drafter, config, CudaSampling(queue, launch)) as executor:
        yield executor, capture


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    return [
        Request(
            prompt,
            4 + index % 9,
            KINDS[index % len(KINDS)],
            OutputConfig(return_log_probs=index % 5 == 0),
            end_id=1,
        )
        for index, prompt in enumerate(prompts(18))
    ]


@pytest.fixture(scope="module")
def of_processes(demo: DemoPair, requests: list[Request]) -> Outputs:
    with demo.executor(TARGET, max_tokens=8192) as executor:
        return run_all(executor, requests)


@pytest.mark.parametrize("draft", [None, "draft-fp8", "ngram"])
def test_tokens_equal_those_of_processes(
    demo: DemoPair, requests: list[Request], of_processes: Outputs, draft: str | None
) -> None:
    with lockstep_executor(demo, draft) as (executor, capture):
        assert run_all(executor, requests) == of_processes
        assert run_all(executor, requests[:3]) == of_processes[:3], "one by one, from a warm cache"
    assert sum(graph.num_replays for graph in capture.graphs) > 0

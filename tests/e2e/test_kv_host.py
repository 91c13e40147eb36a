"""Blocks that went to host memory and came back are the same to the last bit: real engines, real
kernels, the cpu backend and the host's part of the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.cuda import launch_sampling, open_on_fake_device
from support.e2e import DRAFT_LEN, DemoPair, Outputs, PromptMaker, run_all

from llmctl.errors import BadConfig, OutOfMemory
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import Request, SamplingConfig

MAX_TOKENS = 320  # in the cache: two prompts, so that most are evicted before they return


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    """Long prompts, each asked three times with other endings and far between."""
    stems = [prompt for prompt in prompts(240) if len(prompt) > 70][:9]
    return [
        Request((*stem, 50 + turn), 6, SamplingConfig(temperature=0.8, top_k=0, seed=turn))
        for turn in range(3)
        for stem in stems
    ]


@pytest.fixture(scope="module")
def plain(demo: DemoPair, requests: list[Request]) -> Outputs:
    with demo.executor("target-fp8", enable_block_reuse=False) as executor:
        return [run_all(executor, [request])[0] for request in requests]


@contextmanager
def on_fake_device(demo: DemoPair, draft: str | None) -> Iterator[Executor]:
    """The CUDA backend with the CPU's arithmetic."""
    queue = DeviceQueue("cpu")

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)

    target, _ = open_on_fake_device(demo.engine("target-fp8"), queue)
    drafter = None
    if draft is not None:
        drafter = DraftEngineDrafter(open_on_fake_device(demo.engine(draft), queue)[0], DRAFT_LEN)
    blocks = KvCacheConfig(MAX_TOKENS // target.tokens_per_block, num_host_blocks=100)
    config = ExecutorConfig(blocks)
    with Executor(target, drafter, config, CudaSampling(queue, launch)) as executor:
        yield executor


@pytest.mark.parametrize("draft", [None, "draft-fp8"])
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_output_is_the_same_when_prompts_come_back_from_host_memory(
    demo: DemoPair,
    requests: list[Request],
    plain: Outputs,
    backend: str,
    draft: str | None,
) -> None:
    options = {"max_tokens": MAX_TOKENS, "host_memory_bytes": 1 << 26}
    opened = demo.executor("target-fp8", draft, **options)
    with opened if backend == "cpu" else on_fake_device(demo, draft) as executor:
        found = [run_all(executor, [request])[0] for request in requests]
        last = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert found == plain
    assert last.onboarded_blocks > 20 and last.token_hit_rate > 0.4


@pytest.mark.parametrize(
    ("num_bytes", "error", "words"),
    [(100, BadConfig, "one KV block takes"), (1 << 50, OutOfMemory, "of host memory are free")],
)
def test_a_host_tier_that_cannot_be_is_refused_with_the_numbers(
    demo: DemoPair, num_bytes: int, error: type[Exception], words: str
) -> None:
    opened = demo.executor("target-fp8", host_memory_bytes=num_bytes)
    with pytest.raises(error, match=words), opened:
        pass

"""An INT8 KV cache from calibration to text: near the exact cache, and exact with itself under
drafts, batches, reuse and host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e import DRAFT_LEN, DemoPair, PromptMaker, run_all

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request, SamplingConfig


@pytest.fixture(scope="module")
def engine(demo: DemoPair) -> Path:
    """The demo target with FP8 weights and INT8 keys and values."""
    checkpoint, path = demo.folder / "target-int8-checkpoint", demo.folder / "target-int8"
    folders = ["--model-dir", demo.checkpoint("target"), "--output-dir", checkpoint]
    demo.llmctl("quantize", *folders, "--qformat", "fp8", "--kv-cache-dtype", "int8",
                "--calib-size", 8, "--calib-max-seq-length", 64)  # fmt: skip
    folders = ["--checkpoint-dir", checkpoint, "--output-dir", path]
    demo.llmctl("build", "--backend", "cpu", *folders, "--max-seq-len", 1024, "--max-draft-len",
                DRAFT_LEN, "--speculative-decoding-mode", "draft_tokens_external")  # fmt: skip
    return path


def test_text_is_the_same_with_drafts_reuse_and_host_memory_and_near_the_exact_caches(
    demo: DemoPair, engine: Path, prompts: PromptMaker
) -> None:
    requests = [
        Request(prompt, 16, SamplingConfig(0.8, 0, seed=index) if index % 2 else SamplingConfig())
        for index, prompt in enumerate(prompts(12) * 2)
    ]
    target = open_cpu_engine(engine)
    assert target.plan.kv_cache.dtype == "int8"
    with Executor(
        target, None, ExecutorConfig(KvCacheConfig(200, enable_block_reuse=False)), CpuSampling()
    ) as executor:
        wanted = [run_all(executor, [request])[0] for request in requests]
    drafter = DraftEngineDrafter(open_cpu_engine(demo.engine("draft-fp8")), DRAFT_LEN)
    config = ExecutorConfig(KvCacheConfig(14, num_host_blocks=200), check_invariants=True)
    with Executor(open_cpu_engine(engine), drafter, config, CpuSampling()) as executor:
        assert run_all(executor, requests) == wanted
        assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.onboarded_blocks > 0
    with demo.executor("target-fp8") as executor:
        fp8 = run_all(executor, requests)
    pairs = [(a[0], b[0]) for a, b in zip(wanted, fp8, strict=True)]
    first = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    assert first > 0.7, "the first tokens differ from those of an FP8 cache"

"""What a step needs depends on the chunk alone: prompts of any length share one arena."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request

CHUNK = 1024
LONGEST = 32_000
KIB = 1024


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    """One layer with one head, for contexts of LONGEST tokens."""
    folder = tmp_path_factory.mktemp("long")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LONGEST + 64,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder / "checkpoint")
    request = BuildRequest(max_batch_size=2, max_num_tokens=CHUNK, max_seq_len=LONGEST + 64)
    run_build(plan_build(folder / "checkpoint", request, backend="cpu"), folder / "engine")
    return folder / "engine"


def test_prompts_of_1k_and_32k_tokens_run_in_the_same_activation_memory(engine_dir):
    target = open_cpu_engine(engine_dir)
    arena_bytes = target.plan.arena_bytes
    num_blocks = -(-(LONGEST + 64) // target.tokens_per_block)
    config = ExecutorConfig(KvCacheConfig(num_blocks, enable_block_reuse=False))
    prompt = np.random.default_rng(0).integers(0, 64, LONGEST).tolist()
    grown = {}
    with Executor(target, None, config, CpuSampling()) as executor:
        for length in (1_000, LONGEST):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            executor.await_responses(executor.enqueue_request(Request(tuple(prompt[:length]), 2)))
            grown[length] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        steps = executor.get_latest_iteration_stats()
    assert target.plan.arena_bytes == arena_bytes
    assert max(step.inflight_batching_stats.num_ctx_tokens for step in steps) <= CHUNK
    assert len(steps) == 2 + 1 + -(-LONGEST // CHUNK)  # chunks, and a token each
    # The rest of what the long prompt touched is its KV cache and the ids of its tokens.
    kv_kib = num_blocks * target.kv_bytes_per_block // KIB
    ids_kib = 40 * 8 * LONGEST // KIB
    assert grown[LONGEST] <= kv_kib + ids_kib + 1280

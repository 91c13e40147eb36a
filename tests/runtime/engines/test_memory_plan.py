"""Target and draft caches are planned together, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmctl.errors import BadConfig, OutOfMemory
from llmctl.runtime.engines.cpu_cache import CpuCache
from llmctl.runtime.engines.memory_plan import plan_kv_cache


@dataclass
class Shape:
    kv_bytes_per_block: int
    tokens_per_block: int = 32
    max_batch_size: int = 8
    max_seq_len: int = 100  # 4 blocks


def test_memory_limits_the_pool_and_both_models_share_the_fraction() -> None:
    plan = plan_kv_cache([Shape(900), Shape(100)], free_fraction=0.5, free_bytes=20_000)
    assert (plan.num_blocks, plan.bytes_per_block) == (10, 1000)
    assert (plan.limited_by, plan.total_bytes) == ("free memory", 10_000)


def test_the_pool_never_exceeds_what_the_batch_limit_can_use() -> None:
    plan = plan_kv_cache([Shape(1000)], free_bytes=10**12)
    assert (plan.num_blocks, plan.limited_by) == (2 * 8 * 4, "max_batch_size")


def test_a_token_cap_is_combined_by_minimum() -> None:
    plan = plan_kv_cache([Shape(1000)], max_tokens=70, free_bytes=10**12)
    assert (plan.num_blocks, plan.limited_by) == (2, "max_tokens")
    plan = plan_kv_cache([Shape(1000)], max_tokens=10**9, free_bytes=10_000)
    assert (plan.num_blocks, plan.limited_by) == (5, "free memory")


def test_a_pool_of_no_blocks_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match="limited by max_tokens") as refused:
        plan_kv_cache([Shape(5_000_000)], max_tokens=1, free_bytes=10**12)
    assert refused.value.fix == "raise --max-tokens-in-paged-kv-cache"
    with pytest.raises(OutOfMemory, match="0 blocks of 5.00 MB.*limited by free memory"):
        plan_kv_cache([Shape(5_000_000)], free_bytes=1_000_000)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 2.0])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(BadConfig, match="fraction"):
        plan_kv_cache([Shape(1000)], free_fraction=fraction)


def test_a_cache_of_a_cpu_takes_memory_where_its_blocks_are_used() -> None:
    """So an engine starts at once, however many tokens its limits allow."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    kv_cache = SimpleNamespace(
        dtype="bfloat16", num_layers=2, num_kv_heads=4, tokens_per_block=32, head_size=64
    )
    plan: Any = SimpleNamespace(caches={"": kv_cache})
    cache, before = CpuCache(plan), resident()
    cache.allocate(4096)
    assert cache.tensor.nbytes == 4096 * 2 * 2 * 4 * 32 * 64 * 2
    cache.tensor[:, 7] = 3
    assert resident() - before < cache.tensor.nbytes / 10
    assert torch.equal(
        cache.tensor[:, 6:9].float().sum((0, 2, 3, 4, 5)).sign(), torch.tensor([0.0, 1, 0])
    )
    with pytest.raises(OutOfMemory, match="a KV cache of 1099511627776 blocks needs .* GB"):
        cache.allocate(1 << 40)

"""Schedulers, caches and limits of every kind, for random traffic."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

from llmctl.runtime.kv_cache import AttentionWindow, KvCacheManager, most_step_tokens
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, Limits, SchedulerConfig


@st.composite
def setups(draw):
    size = draw(st.sampled_from([1, 2, 4, 8]))
    policy = draw(st.sampled_from(CapacitySchedulerPolicy))
    config = SchedulerConfig(
        capacity_scheduler_policy=policy,
        context_chunking_policy=draw(st.sampled_from(ContextChunkingPolicy)),
        # A paused sequence must be able to come back in one step: `arrive` sees to it.
        enable_chunked_context=draw(st.booleans()),
    )
    group = draw(st.sampled_from([0, 0, size, 2 * size, 3 * size]))
    max_num_tokens = draw(st.integers(max(size, group), 40))
    max_draft_len = draw(st.integers(0, 5))
    window = None
    if draw(st.booleans()):
        width = draw(st.integers(1, 30))
        tile = draw(st.sampled_from([1, 2, 8]))
        window = AttentionWindow(width, draw(st.integers(0, width - 1)), tile, group_lag=tile)
    cache = KvCacheManager(
        num_blocks=draw(st.integers(2, 24)),
        tokens_per_block=size,
        enable_block_reuse=draw(st.sampled_from([True, True, False])),
        enable_partial_reuse=draw(st.booleans()),
        groups=draw(st.sampled_from([("target",), ("target", "draft")])),
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 3, 20])),
        offload_min_priority=draw(st.sampled_from([0, 35, 60])),
        window=window,
        max_step_tokens=most_step_tokens(max_num_tokens, max_draft_len),
        clock=count().__next__,
        onboards_aside=draw(st.booleans()),
        context_group=group,
    )
    limits = Limits(
        max_batch_size=draw(st.integers(1, 6)),
        max_num_tokens=max_num_tokens,
        max_seq_len=draw(st.integers(2, 60)),
        max_draft_len=max_draft_len,
    )
    return config, cache, limits, draw(st.integers(0, 2**32))

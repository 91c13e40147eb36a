"""Real engines with a window and sinks: a ring of blocks gives what the mask alone gives, with a
draft and without, and holds the same memory at the end as at the start."""

from __future__ import annotations

import pytest
from support.e2e import DRAFT_LEN, DemoPair, Outputs, PromptMaker, run_all

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, cache_window
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.step import Span, pack

WINDOW = WindowOptions((18, 12), 3)  # a list: layers alternate
MANY_WINDOWS = 50 * 18


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    chosen = prompts(40)[:10]
    made = [Request(prompt, 150, SamplingConfig(0.8, 0, seed=7)) for prompt in chosen]
    return [*made, Request(chosen[0][:20], MANY_WINDOWS)]


def run(
    demo: DemoPair, requests: list[Request], *, is_ring: bool, draft: bool = False, blocks: int = 60
) -> tuple[Outputs, list[int]]:
    """(outputs, blocks in use after every step)."""
    target = open_cpu_engine(demo.engine("target-fp8"), WINDOW)
    drafter, plans = None, [target.plan]
    if draft:
        engine = open_cpu_engine(demo.engine("draft-fp8"), WINDOW)
        drafter = DraftEngineDrafter(engine, DRAFT_LEN)
        plans.append(engine.plan)
    window = cache_window(plans, WINDOW, target.max_seq_len) if is_ring else None
    config = ExecutorConfig(
        KvCacheConfig(blocks, window=window), iter_stats_max_iterations=10_000,
        check_invariants=True,
    )  # fmt: skip
    with Executor(target, drafter, config, CpuSampling()) as executor:
        outputs = run_all(executor, requests)
        stats = executor.get_latest_iteration_stats()
    return outputs, [item.kv_cache_stats.used_num_blocks for item in stats]


@pytest.fixture(scope="module")
def masked(demo: DemoPair, requests: list[Request]) -> Outputs:
    """What they are answered where every block stays."""
    return run(demo, requests, is_ring=False, blocks=400)[0]


@pytest.mark.parametrize("draft", [False, True])
def test_a_ring_gives_what_the_mask_gives(
    demo: DemoPair, requests: list[Request], masked: Outputs, draft: bool
) -> None:
    found, _ = run(demo, requests, is_ring=True, draft=draft, blocks=900)
    assert found == masked


def test_memory_is_the_same_at_the_end_of_fifty_windows_as_at_the_start(
    demo: DemoPair, requests: list[Request]
) -> None:
    _, used = run(demo, requests[-1:], is_ring=True, blocks=80)
    assert len(used) >= MANY_WINDOWS
    assert max(used[300:]) <= max(used[:300]) <= 5  # 29 blocks without a ring


def test_logits_are_those_of_the_reference_mask(demo: DemoPair, requests: list[Request]) -> None:
    import numpy as np
    import torch

    from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
    from llmctl.runtime.kv_cache.attention_windows import apply_windows
    from llmctl.runtime.request import Sequence

    folder = demo.engine("target-bfloat16")
    request = max(requests, key=lambda item: len(item.input_token_ids))
    tokens = list(request.input_token_ids)
    sequence = Sequence(1, 1, request, 0, tokens, len(tokens), 999, block_table=list(range(8)))
    step = pack([Span(sequence, 0, len(tokens))], 32)
    engine = open_cpu_engine(folder, WINDOW)
    engine.allocate_kv_cache(8)
    found = np.array(engine.run(step))
    engine = open_cpu_engine(folder)
    engine.allocate_kv_cache(8)
    without = np.array(engine.run(step))
    plan, weights = open_with_tables(folder)
    plan = apply_windows(plan, WINDOW, 1024, "cpu")
    tensors = bind_plan(plan, weights, torch.zeros(plan.arena_bytes, dtype=torch.uint8))
    cache = torch.zeros(kv_cache_shape(plan, 8), dtype=torch.bfloat16)
    ReferenceProgram(make_calls(plan, tensors)).run(step, cache)
    wanted = tensors[plan.logits][:1].numpy()
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < 0.03 < np.linalg.norm(found - without) / np.linalg.norm(wanted)

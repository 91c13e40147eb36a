"""The plan of a GPU's memory, from numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmctl.errors import OutOfMemory
from llmctl.runtime.engines.memory_plan import RESERVED_BYTES, EngineMemory, plan_device

GB = 10**9
# Llama 3.3 70B and 3.2 1B in FP8 with 16-bit embeddings and lm_head, FP8 KV; 32 tokens a block.
LLAMA_70B = EngineMemory(
    role="target",
    weight_bytes=int(72.7 * GB),
    activation_bytes=int(0.35 * GB),
    scratch_bytes=int(0.1 * GB),
    graph_bytes=int(0.2 * GB),
    kv_bytes_per_block=80 * 2 * 8 * 128 * 32,
    tokens_per_block=32,
    max_batch_size=8,
    max_seq_len=8192,
)
LLAMA_1B = replace(
    LLAMA_70B,
    role="draft",
    weight_bytes=int(1.5 * GB),
    activation_bytes=int(0.1 * GB),
    graph_bytes=int(0.05 * GB),
    kv_bytes_per_block=16 * 2 * 8 * 64 * 32,
)
H100 = {"free_bytes": int(84.4 * GB), "total_bytes": int(85.0 * GB)}


def test_70b_with_a_1b_draft_fits_an_80_gb_card_and_stays_below_what_is_free() -> None:
    plan = plan_device([LLAMA_70B, LLAMA_1B], **H100)
    assert plan.kv_cache.limited_by == "free memory"
    assert plan.planned_bytes < H100["free_bytes"]
    assert plan.kv_cache.num_blocks * 32 > 40_000, "room for five sequences of full length"
    bytes_per_block = LLAMA_70B.kv_bytes_per_block + LLAMA_1B.kv_bytes_per_block
    left = H100["free_bytes"] - LLAMA_70B.fixed_bytes - LLAMA_1B.fixed_bytes - RESERVED_BYTES
    assert plan.kv_cache.num_blocks == int(left * 0.9) // bytes_per_block


def test_70b_on_a_40_gb_card_is_refused_with_the_numbers_and_a_way_out() -> None:
    with pytest.raises(OutOfMemory, match="72.70 GB of weights.*39.50 GB free of 42.00") as refused:
        plan_device([LLAMA_70B, LLAMA_1B], free_bytes=int(39.5 * GB), total_bytes=42 * GB)
    assert "quantize" in refused.value.fix


def test_a_draft_that_is_too_much_is_named_as_the_reason() -> None:
    with pytest.raises(OutOfMemory) as refused:
        plan_device([LLAMA_70B, LLAMA_1B], free_bytes=int(74.2 * GB), total_bytes=80 * GB)
    assert "--draft-engine" in refused.value.fix


def test_activations_that_are_too_much_are_named_as_the_reason() -> None:
    wide = replace(LLAMA_70B, activation_bytes=20 * GB)
    with pytest.raises(OutOfMemory) as refused:
        plan_device([wide], **H100)
    assert "--max-num-tokens" in refused.value.fix


def test_a_card_that_leaves_no_block_is_refused() -> None:
    free = LLAMA_70B.fixed_bytes + RESERVED_BYTES + LLAMA_70B.kv_bytes_per_block // 2
    with pytest.raises(OutOfMemory, match="0 blocks"):
        plan_device([LLAMA_70B], free_bytes=free, total_bytes=80 * GB)


def test_both_options_bound_the_cache() -> None:
    half = plan_device([LLAMA_70B], **H100, free_fraction=0.45)
    full = plan_device([LLAMA_70B], **H100)
    assert half.kv_cache.num_blocks == pytest.approx(full.kv_cache.num_blocks / 2, abs=1)
    few = plan_device([LLAMA_70B], **H100, max_tokens=100)
    assert (few.kv_cache.num_blocks, few.kv_cache.limited_by) == (3, "max_tokens")


def test_the_table_names_every_part_and_its_sum() -> None:
    lines = plan_device([LLAMA_70B, LLAMA_1B], **H100).lines()
    assert lines[0].split() == ["device", "memory,", "GB", "target", "draft"]
    assert lines[1].split() == ["weights", "72.700", "1.500"]
    parts = [float(word) for line in lines[1:-1] for word in line.split() if "." in word]
    total = float(lines[-1].split()[1])
    assert total == pytest.approx(sum(parts), abs=0.01)

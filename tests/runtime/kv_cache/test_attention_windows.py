"""Windows asked for at run time: which layer gets which, and what cannot be."""

from __future__ import annotations

import pytest

from llmctl.builder.engine_format import KvCacheSpec, Plan, PlanOp
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.kv_cache import AttentionWindow
from llmctl.runtime.kv_cache.attention_windows import (
    WindowOptions,
    apply_windows,
    cache_window,
    what_windows_save,
)

MAX_SEQ_LEN = 1000


def plan_of(*windows):
    ops = [PlanOp("embedding", "embed", {}, {}, {})]
    ops += [
        PlanOp("paged_attention", f"attend{layer}", {}, {}, {"layer": layer, "window": window})
        for layer, window in enumerate(windows)
    ]
    spec = KvCacheSpec(len(windows), 1, 64, 32, "bfloat16", windows)
    return Plan((), tuple(ops), spec, "logits", 0, 64, 8)


def windows_of(plan):
    found = [op.attributes["window"] for op in plan.ops if op.op == "paged_attention"]
    assert tuple(found) == plan.kv_cache.windows
    return found


@pytest.mark.parametrize(
    ("model", "asked", "wanted"),
    [
        ((0, 0, 0, 0, 0), (64,), [64] * 5),
        ((0, 0, 0, 0, 0), (64, 128), [64, 128, 64, 128, 64]),
        ((100, 0), (200,), [100, 200]),  # never wider than the model's own
        ((0, 0), (64, MAX_SEQ_LEN), [64, 0]),  # as wide as a sequence: everything
    ],
)
def test_sizes_are_repeated_over_the_layers_and_only_narrow(model, asked, wanted):
    for backend in ("cpu", "cuda"):
        plan = apply_windows(plan_of(*model), WindowOptions(asked), MAX_SEQ_LEN, backend)
        assert windows_of(plan) == wanted


def test_sinks_go_to_the_layers_that_have_a_window():
    plan = apply_windows(plan_of(50, 0), WindowOptions((), 4), MAX_SEQ_LEN, "cpu")
    assert [op.attributes.get("sink_tokens") for op in plan.ops] == [None, 4, None]


def test_asking_for_what_the_model_has_changes_nothing_on_any_backend():
    plan = plan_of(64, 64)
    for backend in ("cpu", "cuda"):
        assert apply_windows(plan, WindowOptions(), MAX_SEQ_LEN, backend) is plan
        assert apply_windows(plan, WindowOptions((100,)), MAX_SEQ_LEN, backend) is plan


@pytest.mark.parametrize("options", [WindowOptions((32,)), WindowOptions((), 4)])
def test_compiled_kernels_refuse_other_windows_by_name(options):
    wanted = "'tensorrt' are compiled for the checkpoint's windows .64"
    with pytest.raises(Unsupported, match=wanted):
        apply_windows(plan_of(64, 64), options, MAX_SEQ_LEN, "tensorrt")


@pytest.mark.parametrize(
    ("model", "sizes", "sinks", "words"),
    [
        ((0, 0), (), 4, "every layer sees the whole sequence"),
        ((0, 0), (8,), 8, "leaves no room"),
        ((4, 0), (), 4, "leaves no room"),
    ],
)
def test_sinks_without_room_are_refused(model, sizes, sinks, words):
    with pytest.raises(BadConfig, match=words):
        apply_windows(plan_of(*model), WindowOptions(sizes, sinks), MAX_SEQ_LEN, "cpu")


@pytest.mark.parametrize(
    "wrong", [{"sizes": (0,)}, {"sizes": (8, 1)}, {"sizes": (), "sink_tokens": -1}]
)
def test_sizes_out_of_range_are_refused(wrong):
    with pytest.raises(BadConfig, match="is -1|has [01]; sizes are at least 2"):
        WindowOptions(**wrong)


def test_the_cache_drops_what_no_layer_of_any_engine_sees():
    options = WindowOptions((), 4)
    assert cache_window([plan_of(64, 32)], options, MAX_SEQ_LEN) == AttentionWindow(64, 4)
    assert cache_window([plan_of(64), plan_of(96)], options, 999) == AttentionWindow(96, 4)
    assert cache_window([plan_of(64), plan_of(0)], options, MAX_SEQ_LEN) is None
    assert cache_window([plan_of(16)], options, 32) is None, "a block holds a whole sequence"


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([plan_of(64, 32), plan_of(96)], "rings of blocks for the last 96 tokens"),
        ([plan_of(64, 0, 64, 64)], "as 1 of 4 layers see them;"),
        ([plan_of(64, 64), plan_of(0)], "as 1 of 3 layers see them;"),
        ([plan_of(0, 0), plan_of(0)], None),
    ],
)
def test_what_windows_save_is_said(plans, words):
    window = cache_window(plans, WindowOptions(), MAX_SEQ_LEN)
    found = what_windows_save(plans, window)
    assert found is None if words is None else words in found


def test_a_block_as_long_as_a_sequence_is_said_to_save_nothing():
    plans = [plan_of(16)]
    window = cache_window(plans, WindowOptions(), 32)
    assert what_windows_save(plans, window) == "KV cache: whole sequences, as one block holds one"


def test_more_sizes_than_layers_are_refused():
    plans = [plan_of(0, 0, 0), plan_of(0)]
    assert cache_window(plans, WindowOptions((8, 8, 8)), MAX_SEQ_LEN) is None
    with pytest.raises(BadConfig, match="4 sizes; there are 3 layers"):
        cache_window(plans, WindowOptions((8, 8, 8, 8)), MAX_SEQ_LEN)

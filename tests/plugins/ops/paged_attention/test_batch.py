"""The attention kernel of many requests: what it compiles to, which steps it serves, and where it
cuts contexts. tests/gpu compares its bits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.attention import FP8, INT8, NOT_BY_WARP, World
from support.attention_compiled import (
    BY_WARP,
    PAGES_HERE,
    check_pages,
    copies_to_shared_places,
    largest,
    of_pages,
)
from support.attention_models import OF_SIZE, world_of
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import kernel, launch_arguments
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, count_units

MODEL = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (4096,), "kv_dtype": FP8}


@lru_cache(2)  # each has 70 MB and more
def model(**changes: Any) -> World:
    """MODEL with some fields changed; nobody writes to it."""
    return World(**{**MODEL, **changes})


def launched(world: World, counts: list[int], max_kv_len: int) -> list[Launch]:
    """What a step of requests with so many tokens launches on a GPU."""
    parts = [(0, 64 - min(count, 64), count) for count in counts]
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    return kernel.launches(world.call(parts), env, world.shape(step, max_kv_len=max_kv_len))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv", ["bfloat16", "float16", "fp8", "int8", "fp8 of float16"])
def test_it_compiles_to_tensor_core_instructions_without_spills(size, kv):
    world = world_of(OF_SIZE[size], kv)
    specs = batch.batch_specs(world.call([(0, 0, 1)]), world.limits())
    assert {spec.constants["COLUMNS"] for spec in specs} == set(batch.COLUMNS)
    is_all = (kv, size) == ("fp8", 128)  # others: tests/gpu/test_attention_compiled.py
    for spec, binary, code in compile_all(specs if is_all else largest(specs)):
        assert binary.local_bytes == 0 and not re.search(r"\b(LDL|STL)\b", code), spec.name
        assert "HMMA.16816.F32" in code and "LDGSTS" in code and "LDSM" in code, spec.name
        assert not copies_to_shared_places(code), spec.name
        assert 4 * (binary.shared_bytes + 1024) <= 228 * 1024, "four warps to a multiprocessor"


@pytest.mark.parametrize("specs", BY_WARP)
@pytest.mark.parametrize("tokens_per_block", PAGES_HERE)
def test_kernels_of_warps_compile_for_every_page_size(tokens_per_block, specs):
    check_pages(largest(of_pages(tokens_per_block, specs)))


def test_rows_of_a_request_fit_the_columns_of_the_instruction():
    world = model()
    assert launched(world, [1] * 64, 1024)[0].spec.constants["COLUMNS"] == 8
    assert launched(world, [2] * 64, 1024)[0].spec.constants["COLUMNS"] == 16
    assert launched(world, [3] * 64, 1024)[0].spec.is_triton
    wide = model(kv_heads=4)  # 16 query heads each
    assert launched(wide, [1] * 64, 1024)[0].spec.constants["COLUMNS"] == 16
    assert launched(wide, [2] * 64, 1024)[0].spec.is_triton


def test_beside_chunks_every_request_is_served_by_one_kernel():
    world = model()
    context, generation = launched(world, [1] * 60 + [700, 2], 1024)
    assert context.spec.entry == "chunk"
    assert generation.spec.entry == "batch"
    assert generation.spec.constants["COLUMNS"] == 8
    assert context.arguments[-1] == 2, "the context kernel takes requests of two tokens and more"


@pytest.mark.parametrize("max_kv_len", [1, 700, 1536, 5000, 131072])
@pytest.mark.parametrize("requests", [9, 16, 64, 256])
def test_warps_that_share_contexts_run_at_once_and_have_room(requests, max_kv_len):
    world = model(max_batch_size=256, max_seq_len=131072)
    (launch,) = launched(world, [1] * requests, max_kv_len)
    spec, (warps, *others) = launch.spec, launch.grid
    number, parts, each, grain, room = launch.arguments[-5:]
    assert number == requests and max(parts, 1) * each >= -(-max_kv_len // KEYS)
    partial, counters = launch.arguments[10], launch.arguments[11]
    floats = (128 * 8 // 32 + 3) * 32  # sums and state of eight columns
    assert spec.constants["SEVERAL"] == spec.constants["TOGETHER"] == (max_kv_len > 4096)
    if max_kv_len <= 4096:
        assert others == [8, requests] and parts == warps
        assert 1 + count_units(max_kv_len) - count_units(each * KEYS) <= room
        assert requests * 8 * room * floats <= partial.numel()
        return
    assert others == [8, 1] and parts == warps // requests and each % grain == 0
    assert 1 < warps <= spec.constants["WARPS"] * 132 // 8
    assert 8 * room * floats <= partial.numel() and 8 * warps * 32 <= counters.numel()


@pytest.mark.parametrize("max_kv_len", [2100, 4096])
def test_few_contexts_of_middle_length_are_cut_between_smaller_work_items(max_kv_len):
    (launch,) = launched(model(), [1] * 9, max_kv_len)
    number, parts, each, grain, _ = launch.arguments[-5:]
    assert launch.spec.constants["SEVERAL"] and (number, grain) == (9, 4)
    assert each % 4 == 0 and parts * each >= -(-max_kv_len // KEYS)
    assert launch.grid == (9 * parts, 8, 1)


def test_contexts_are_whole_where_requests_are_many_and_none_is_long():
    world = model(max_batch_size=256, max_seq_len=131072)
    assert launched(world, [1] * 64, 1024)[0].grid == (1, 8, 64)
    assert launched(world, [1] * 9, 1024)[0].grid == (4, 8, 9)
    assert launched(world, [1] * 256, 4096)[0].grid == (1, 8, 256)
    assert launched(world, [1] * 256, 1 << 17)[0].grid == (132, 8, 1)


@pytest.mark.parametrize(
    ("requests", "tokens", "max_kv_len", "grid"),
    [
        (1, 1, batch.LONG + 1, 9),
        (1, 2, 32768, 64),
        (1, 1, 131072, 64),
        (8, 1, 32768, 64),  # leaves places to the next launch
        (64, 1, 32768, 66),
    ],
)
def test_long_contexts_are_divided_by_as_many_warps_as_run_at_once(
    requests: int, tokens: int, max_kv_len: int, grid: int
) -> None:
    (launch,) = launched(model(lengths=(8192,)), [tokens] * requests, max_kv_len)
    assert launch.spec.constants["TOGETHER"] and launch.grid == (grid, 8, 1)
    assert launch.spec.name.endswith(".several" if requests > 1 else ".all")


def test_contexts_of_few_requests_are_divided_into_as_many_parts_each() -> None:
    (launch,) = launched(model(lengths=(8192,)), [1] * 4, 32768)
    assert launch.spec.name.endswith(".all") and launch.grid == (16, 8, 4)
    *_, requests, parts, each, _, room = launch.arguments
    assert (requests, parts, each) == (4, 16, 32)
    floats = (128 * 8 // 32 + 3) * 32
    assert 4 * 8 * room * floats <= launch.arguments[10].numel()
    assert 4 * 8 * parts * 32 <= launch.arguments[11].numel()


def test_without_room_for_its_work_items_a_context_is_not_divided() -> None:
    world = model(lengths=(8192,))
    parts = [(0, 63, 1)]
    call, env = world.call(parts), replace(world.env(world.step(parts)), use_pdl=True)
    stored = 1 + count_units(32768) - count_units(8 * KEYS)
    for room, warps in ((stored, 64), (stored - 1, 1)):
        partials = torch.zeros(8 * room * 35 * 32), torch.zeros(1, dtype=torch.int32)
        own = launch_arguments.own_tensors(call, env), partials, launch_arguments.logit_scale(call)
        assert batch.batch_launch(call, env, 1, 1, 32768, *own).grid == (warps, 8, 1)


@pytest.mark.parametrize(("length_bytes", "is_shared"), [(4, True), (12, True), (13, False)])
def test_lengths_of_all_contexts_fit_where_they_are_kept(
    length_bytes: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring of 24 KB, here of 2,048 requests."""
    monkeypatch.setattr(batch, "_LENGTH_BYTES", length_bytes)
    (launch,) = launched(model(lengths=(8192,), max_batch_size=2048), [1] * 2048, 32768)
    assert (".several" in launch.spec.name) == is_shared


def test_too_many_rows_for_it() -> None:
    world = model(lengths=(8192,), max_batch_size=256)
    assert launched(world, [3], 32768)[0].spec.entry == "attend_long"


def test_each_launch_is_of_a_binary_that_was_built():
    for sizes in ({"size": 64}, {"heads": 32}, {"kv_heads": 4}, {"kv_dtype": INT8}):
        world = model(**sizes)
        built = kernel.kernels(world.call([(0, 0, 1)]), world.limits())
        for counts in ([1] * 3, [2] * 9, [1] * 64, [1] * 30 + [100], [4] * 20):
            for launch in launched(world, counts, 1024):
                assert launch.spec in built


@pytest.mark.parametrize("other", NOT_BY_WARP, ids=lambda other: ", ".join(other))
def test_what_it_does_not_cover_stays_with_triton(other):
    world = model(**other)
    assert not batch.covers_batch(world.call([(0, 0, 1)]), world.limits())
    assert all(launch.spec.is_triton for launch in launched(world, [1] * 64, 64))


def test_many_chains_go_to_the_kernel_of_few_thread_blocks_while_these_run_at_once():
    """As measured (docs/performance/trees.md)."""
    world = model()

    def entry(requests: int, tokens: int, max_kv_len: int) -> str:
        return launched(world, [tokens] * requests, max_kv_len)[0].spec.entry

    assert entry(8, 11, 1024) == entry(16, 6, 1024) == entry(8, 11, 4096) == "tree"
    assert entry(4, 11, 1024) == "tree" and entry(4, 11, 4096) != "tree"
    assert entry(4, 6, 1024) != "tree" and entry(17, 11, 1024) != "tree"

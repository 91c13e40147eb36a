"""Paged attention kernels: interpreted against the reference, cut in many ways, and compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention import FP8, INT8, World, mismatches, same_bits
from support.attention_compiled import HERE, chains_here, check_chains, check_windows
from support.attention_reference import weight_rounding
from support.kernel import KERNEL_DTYPES, launch_env, step_shape

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT, count_units, unit_start
from llmctl.plugins.ops.paged_attention.spec import SPEC

CASES = [
    case
    for case in SPEC.cases
    if case["dtype"] in KERNEL_DTYPES and case["head_size"] in kernel.HEAD_SIZES
]


def label(case: object) -> str:
    return ".".join(map(str, case.values())) if isinstance(case, dict) else str(case)


def execute(launches: list[Launch]) -> None:
    with np.errstate(all="ignore"):  # rows of no request may divide by zero
        run_launches(launches)


def run_reference(example: Example) -> torch.Tensor:
    call = example.call
    reference(call.inputs, call.outputs, call.attributes, example.step, example.kv_cache)
    return call.outputs["out"].float()


@pytest.mark.parametrize("case", CASES, ids=label)
def test_kernels_compute_what_the_reference_does(case):
    found = make_example("paged_attention", case)
    wanted = run_reference(found.clone())
    bound = weight_rounding(found)
    execute(kernel.launches(found.call, launch_env(found), step_shape(found.step)))
    out = found.call.outputs["out"]
    rounding = SPEC.tolerance[str(out.dtype).removeprefix("torch.")]
    excess = (out.float() - wanted).abs() - (bound + rounding.atol + rounding.rtol * wanted.abs())
    assert excess.max() <= 0  # and NaN is not


@pytest.mark.parametrize(
    "world",
    [
        # beyond 1,024 keys units are two tiles long: one such unit, and a part of the next
        {"heads": 2, "kv_heads": 1, "kv_dtype": FP8, "quantize_out": True, "lengths": (1160, 90)},
        {"lengths": (200, 150), "size": 128, "heads": 7, "kv_heads": 1, "tokens_per_block": 8},
        {"lengths": (333, 90), "size": 80, "window": 70, "tokens_per_block": 128},
        {"lengths": (200, 150), "kv_dtype": INT8, "quantize_out": True},
        {"lengths": (420, 300), "window": 90, "sinks": 5},
        {"lengths": (420, 190), "window": 210, "sinks": 130, "size": 128, "kv_dtype": FP8},
        # in units of two tiles: sinks end within a tile, the window begins within a unit
        {"lengths": (1400, 90), "window": 150, "sinks": 70, "heads": 2, "kv_heads": 1},
    ],
    ids=label,
)
def test_a_rows_bits_do_not_depend_on_how_steps_are_cut(world):
    """Alone, split, in a chunk, in a draft, in a batch, with padding, under any bound."""
    world = {"heads": 4, "kv_heads": 2, "size": 64, **world}
    assert mismatches(World(**world), execute) == []


@pytest.mark.parametrize(
    ("window", "sinks"), [(24, 4), (40, 33), (64, 32), (100, 64), (9, 8), (300, 5), (200, 150)]
)
def test_windows_with_sinks_compute_what_the_reference_does(window, sinks):
    case = {
        **CASES[0],
        "requests": "70+33 3+164 1+290 5+0 17+300",
        "window": window,
        "tokens_per_block": 8,
    }
    found = make_example("paged_attention", case)
    found.call.attributes["sink_tokens"] = sinks
    wanted = run_reference(found.clone())
    bound = weight_rounding(found)
    execute(kernel.launches(found.call, launch_env(found), step_shape(found.step)))
    rounding = SPEC.tolerance[str(case["dtype"])]
    difference = (found.call.outputs["out"].float() - wanted).abs()
    assert (difference <= bound + rounding.atol + rounding.rtol * wanted.abs()).all()


@pytest.mark.parametrize("size", [64, 128])  # they load ahead differently
def test_a_window_asked_for_gives_the_bits_of_the_checkpoints(size):
    own = World(4, 2, size, (330,), window=70)
    asked = replace(own, sinks=0, scratch={})
    for part in ([(0, 0, 330)], [(0, 329, 1)], [(0, 319, 11)]):
        assert same_bits(own.run(part, execute)[0], asked.run(part, execute)[0])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(40, 0), (40, 3), (130, 70)])
def test_nothing_is_read_between_the_sinks_and_the_window_beyond_a_tile(window, sinks, size):
    """Entries of the block table that were dropped may hold anything."""
    world = World(4, 2, size, (500,), window=window, sinks=sinks)
    wanted = {}
    for start, count in ((499, 1), (489, 11), (450, 50)):
        wanted[start, count] = world.run([(0, start, count)], execute)[0]
    first = -(-sinks // KEYS) * KEYS // world.tokens_per_block
    for (start, count), rows in wanted.items():
        oldest = (start + 1 - (window - sinks)) // KEYS * KEYS // world.tokens_per_block
        assert oldest - first >= 6
        kept = world.tables[0].clone()
        world.tables[0, first:oldest] = 1 << 30  # far outside the cache
        assert same_bits(world.run([(0, start, count)], execute)[0], rows)
        world.tables[0] = kept


def test_int8_gives_the_bits_of_a_float16_cache_that_holds_the_same_numbers():
    """Every whole number from -127 to 127 is read exactly, and -128, which is never written."""
    queries = {"dtype": torch.float16, "lengths": (300,), "spread": 0.02}
    world = World(4, 2, 64, kv_dtype=INT8, **queries)
    world.cache.flatten()[:256] = torch.arange(-128, 128).to(torch.int8)
    wide = World(4, 2, 64, kv_dtype=torch.float16, **queries)
    wide.cache.copy_(world.cache)
    wide.scales = world.scales
    for part in ([(0, 0, 300)], [(0, 299, 1)], [(0, 289, 11)]):
        assert same_bits(world.run(part, execute)[0], wide.run(part, execute)[0])


def test_units_are_few_and_short():
    assert [count_units(n * KEYS) for n in (0, 1, 16, 17, 18, 32)] == [0, 1, 16, 17, 17, 24]
    assert count_units(1 << 17) == 32 + (2048 - 64) // MOST_UNIT
    assert [unit_start(n) for n in (0, 1, 16, 17, 24, 25)] == [0, 1, 16, 18, 32, 36]
    assert all(count_units(unit_start(n) * KEYS + 1) == n + 1 for n in range(300))


def test_triton_counts_units_as_the_host_does():
    tiles = 600  # units have grown to their largest at 64, and there are many of those
    out = torch.zeros((tiles, 3), dtype=torch.int32)
    source = "support.cuda_samples.tiles_triton:describe_tiles"
    execute([Launch(KernelSpec("tiles", source, ("*i32",)), (tiles, 1, 1), (out,))])
    starts = [unit_start(unit) for unit in range(count_units(tiles * KEYS) + 1)]
    for tile, (index, start, following) in enumerate(out.tolist()):
        assert starts[index] == start <= tile < starts[index + 1]
        assert following == (tile if tile == start else starts[index + 1])


def test_splits_are_counted_so_that_all_run_at_once():
    """They wait for each other: two thread blocks must fit an SM, and no more may be launched."""
    for batch in (1, 3, 16, 64):
        for tokens in (1, 11, 17):
            world = World(64, 8, 128, (64,), kv_dtype=FP8)
            parts = [(0, 64 - tokens, tokens)] * batch
            step = world.step(parts)
            shape = world.shape(step, max_kv_len=1 << 17)
            (launch,) = kernel.launches(world.call(parts), world.env(step), shape)
            splits, heads, requests = launch.grid
            assert splits == 1 or splits * heads * requests <= 2 * world.limits().num_sms


@pytest.mark.parametrize(("heads", "kv"), HERE)
def test_kernels_compile_to_tensor_core_groups_without_spills(heads, kv):
    """test_cuda_kernels.py counts on these checks, and on those of tests/gpu."""
    check_chains(chains_here(heads, kv))


def test_windows_compile_without_spills():
    """Of an INT8 cache: tests/gpu/test_attention_compiled.py."""
    check_windows("fp8")


def test_head_sizes_without_a_kernel_are_named():
    world = World(2, 1, 18, (64,))
    with pytest.raises(Unsupported, match=r"head size 18 .* wanted head size 64, 80, 96, 128"):
        kernel.kernels(world.call([(0, 0, 1)]), world.limits())

"""The CUDA C++ generation kernel: what it compiles to, and which steps it serves."""

from __future__ import annotations

import re

import pytest
import torch
from support.attention import FP8, INT8, World, short_launch
from support.attention_compiled import largest
from support.attention_models import OF_SIZE, world_of
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.generation import generation
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units

MODEL = {
    "heads": 64,
    "kv_heads": 8,
    "size": 128,
    "lengths": (64,),
    "kv_dtype": FP8,
    "max_seq_len": 1 << 16,
}
SMALL = {**MODEL, "heads": 32, "size": 64}
LONG = 8192  # tokens: shorter contexts of heads of 128 are verification.cu's


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv", ["bfloat16", "float16", "fp8", "fp8 of float16"])
def test_it_compiles_to_tensor_core_groups_without_spills(size, kv):
    world = world_of(OF_SIZE[size], kv)
    specs = generation.generation_specs(world.call([(0, 0, 1)]), world.limits())
    is_all = (kv, size) == ("fp8", 128)  # others: tests/gpu/test_attention_compiled.py
    for spec, binary, code in compile_all(specs if is_all else largest(specs)):
        assert binary.local_bytes == 0 and not re.search(r"\b(LDL|STL)\b", code), spec.name
        assert "HGMMA" in code and not re.search(r"\bHMMA", code), spec.name
        if spec.cluster > 1:  # units travel between shared memories
            assert "STAS" in code, spec.name
        blocks = 3 if size == 64 else 2
        assert blocks * binary.threads * (-(-binary.registers // 8) * 8) <= 1 << 16
        assert blocks * (binary.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("tokens_per_block", [8, 128])
def test_it_compiles_for_every_page_size(tokens_per_block):
    """With 16 it has the registers that it has with 8, with 64 those of 128."""
    world = World(8, 2, 128, (64,), kv_dtype=FP8, tokens_per_block=tokens_per_block)
    for spec in generation.generation_specs(world.call([(0, 0, 1)]), world.limits()):
        assert compile_kernel(spec).local_bytes == 0


def test_it_serves_few_requests_and_leaves_many_to_others():
    world, small = World(**MODEL), World(**SMALL)
    assert short_launch(small, 1, 1, 1024).spec.entry == "generation"
    wide = World(**{**MODEL, "kv_dtype": torch.bfloat16})
    assert short_launch(wide, 1, 11, LONG).spec.entry == "generation"
    assert short_launch(world, 1, 11, LONG).spec.entry == "attend_long"
    assert short_launch(world, 1, 8, 1 << 16).spec.entry == "attend_long"
    assert short_launch(small, 2, 1, 512).spec.cluster == 8
    assert short_launch(world, 3, 1, LONG).spec.entry == "batch"
    assert short_launch(world, 3, 3, LONG).spec.entry == "attend_long"
    assert short_launch(world, 64, 1, 512).spec.entry == "batch"


def test_a_verification_has_blocks_without_clusters_where_clusters_find_no_room():
    """Two blocks of rows for each of 8 KV heads: 16 clusters of 16 would run in two waves."""
    world = World(**{**MODEL, "kv_dtype": torch.bfloat16})
    for tokens in (9, 11, 16):
        launch = short_launch(world, 1, tokens, LONG)
        assert launch.spec.cluster == 1 and launch.spec.entry == "generation"
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        assert blocks <= 2 * world.limits().num_sms  # they wait for each other
    wide = World(**{**MODEL, "heads": 32, "kv_dtype": torch.bfloat16})
    assert short_launch(wide, 1, 16, LONG).spec.cluster == 16


def test_a_block_leaves_registers_for_one_of_the_next_product():
    """Two blocks of attention and one of a packed product, 160 threads of at most 88 registers."""
    world = World(**MODEL)
    for spec in generation.generation_specs(world.call([(0, 0, 1)]), world.limits()):
        registers = -(-compile_kernel(spec).registers // 8) * 8
        assert 2 * 128 * registers + 160 * 88 <= 1 << 16


def test_each_launch_is_of_a_binary_that_was_built():
    for sizes in ({"size": 64}, {"size": 128}):
        world = World(**{**MODEL, **sizes})
        built = kernel.kernels(world.call([(0, 0, 1)]), world.limits())
        for requests in (1, 2, 3):
            for tokens in (1, 5, 17):
                for keys in (64, 512, 4096):
                    assert short_launch(world, requests, tokens, keys).spec in built


def test_a_block_of_rows_fits_a_tensor_core_instruction_and_covers_every_token():
    for heads, kv_heads in ((64, 8), (32, 8), (7, 1), (8, 8)):
        world = World(heads, kv_heads, 64, (64,), kv_dtype=FP8)
        for tokens in range(1, kernel.SHORT + 1):
            cut = generation.choose_cut(world.call([(0, 0, 1)]), 1, tokens, 64, 132)
            if cut is not None:
                assert cut.block_tokens * (heads // kv_heads) <= generation.ROWS
                assert cut.block_tokens * cut.num_blocks >= tokens


@pytest.mark.parametrize(
    "other",
    [
        {"window": 100},
        {"kv_dtype": INT8},
        {"size": 96},
        {"tokens_per_block": 24},
        {"tokens_per_block": 1},
    ],
)
def test_what_it_does_not_cover_stays_with_the_other_kernels(other):
    world = World(**{**MODEL, **other})
    call, limits = world.call([(0, 0, 1)]), world.limits()
    assert not generation.covers(call, limits)
    if "tokens_per_block" not in other:  # Triton divides at compile time
        assert all(spec.entry != "generation" for spec in kernel.kernels(call, limits))
    assert short_launch(world, 1, 1, 64).spec.entry != "generation"


def test_short_contexts_take_the_smaller_cluster():
    assert count_units(512) == 8
    assert short_launch(World(**SMALL), 1, 1, 512).spec.cluster == 8
    assert short_launch(World(**SMALL), 1, 1, 513).spec.cluster == 16

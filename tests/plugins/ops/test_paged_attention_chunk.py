"""The CUDA C++ kernel for context chunks: what it compiles to, and which steps it serves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.attention import FP8, INT8, Part, World
from support.kernel import disassemble

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import (
    compile_kernel,
    is_needed,
)
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import chunk, kernel

MODEL = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (700, 333), "kv_dtype": FP8}
PROMPT: list[Part] = [(0, 0, 700)]


def launches_of(world: World, parts: list[Part]) -> list[Launch]:
    """What a step launches on a GPU."""
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    return kernel.launches(world.call(parts), env, world.shape(step))


@pytest.mark.parametrize("heads", [(64, 8), (7, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("kv", ["bfloat16", "float16", "fp8", "fp8 of float16"])
def test_it_keeps_sums_in_registers_and_products_in_flight(kv, heads):
    dtype = torch.float16 if "float16" in kv.split() else torch.bfloat16
    kv_dtype = FP8 if kv.startswith("fp8") else dtype
    world = World(*heads, 128, (64,), dtype, kv_dtype, quantize_out=kv_dtype == FP8)
    binary = compile_kernel(chunk.chunk_spec(world.call([(0, 0, 1)]), world.limits()))
    code = disassemble(binary)
    assert binary.local_bytes == 0 and not re.search(r"\b(LDL|STL)\b", code)
    # Logits of an item's first tile and of the next, eight steps each; values of a tile and of the
    # last, four each.
    assert len(re.findall(r"\bHGMMA", code)) == 24
    # A compiler that cannot tell that registers are free waits after every product.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) <= 4
    assert len(re.findall("USETMAXREG", code)) == 2
    assert ("F2FP.F16.E4M3" in code) == (kv_dtype == FP8)
    assert ("LDGSTS" in code) == (kv_dtype != FP8)


@pytest.mark.parametrize("tokens_per_block", [2, 8, 16, 64, 128])
@pytest.mark.parametrize("kv_dtype", [FP8, torch.bfloat16], ids=str)
def test_it_compiles_for_every_page_size(tokens_per_block, kv_dtype):
    world = World(8, 2, 128, (64,), kv_dtype=kv_dtype, tokens_per_block=tokens_per_block)
    spec = chunk.chunk_spec(world.call([(0, 0, 1)]), world.limits())
    assert compile_kernel(spec).local_bytes == 0


@pytest.mark.parametrize("requests", [1, 64, 1000, 4096])
def test_its_shared_memory_has_room_for_requests_and_some_tiles(requests):
    world = World(**MODEL, max_batch_size=requests)
    spec = chunk.chunk_spec(world.call(PROMPT), world.limits())
    stages = spec.constants["STAGES"]
    assert isinstance(stages, int) and stages >= 3
    assert spec.shared_bytes <= HOPPER.max_shared_bytes
    assert spec.shared_bytes >= (4 + 2 * stages) * 64 * 128 * 2 + 16 * (requests + 1)


def test_it_serves_chunks_and_what_is_beside_them():
    world = World(**MODEL)
    built = kernel.kernels(world.call(PROMPT), world.limits())
    (alone,) = launches_of(world, PROMPT)
    assert alone.spec.entry == "chunk" and alone.spec in built
    assert alone.grid == (world.limits().num_sms, 1, 1)
    beside = launches_of(world, [(0, 0, 600), *[(1, 300, 1)] * 3])
    assert [each.spec.entry for each in beside] == ["chunk", "batch"]
    needed = [spec for spec in built if is_needed(spec, HOPPER.capability)]
    assert all(each.spec in needed for each in (alone, *beside))
    (triton,) = [spec for spec in built if spec.unused_on]
    assert triton.source.endswith("triton_context:context") and is_needed(triton, "8.9")
    assert not is_needed(triton, HOPPER.capability), "an engine for Hopper would never launch it"
    (short,) = launches_of(world, [(0, 0, 18)])
    assert short.grid == (16, 1, 1)  # an item for each KV head, and those that a request may add


@pytest.mark.parametrize(
    "other",
    [
        {"window": 100},
        {"kv_dtype": INT8},
        {"size": 64},
        {"size": 96},
        {"tokens_per_block": 24},
        {"max_batch_size": 5000},
    ],
    ids=str,
)
def test_what_it_does_not_cover_stays_with_the_triton_kernel(other):
    world = World(**{**MODEL, **other})
    launches = launches_of(world, PROMPT)
    assert launches[0].spec.source.endswith("triton_context:context")
    assert all(spec.entry != "chunk" for spec in kernel.kernels(world.call(PROMPT), world.limits()))

"""An engine holds the attention kernels that its steps launch, whatever its limits are, and not
those that only larger steps would."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from support.attention import FP8, INT8, World
from support.attention_steps import limits_of, needed, on_no_device, shapes_within

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.verification import verification

# Query heads, KV heads, head size, type of the cache.
MODELS = {
    "70b": (64, 8, 128, FP8),
    "8b": (32, 8, 128, torch.bfloat16),
    "1b": (32, 8, 64, INT8),
    "0.5b": (14, 2, 64, FP8),
    "one KV head": (16, 1, 128, INT8),
    "96 wide": (8, 2, 96, FP8),
}


def world_of(model: str) -> World:
    *heads, kv_dtype = MODELS[model]
    return World(*heads, (64,), kv_dtype=kv_dtype)


@pytest.mark.parametrize("model", MODELS)
def test_every_step_within_the_limits_finds_its_kernels(model: str) -> None:
    world, part = world_of(model), [(0, 0, 1)]
    step, call = world.env(world.step(part)).step, world.call(part)
    every = list(
        product((1, 2, 6, 64), (8, 64, 2048), (60, 1024, 1100, 4096, 20000), (0, 5, 40, 128))
    )
    found: set[str] = set()
    for numbers in random.Random(model).sample(every, 20):
        limits = limits_of(world, *numbers)
        env = LaunchEnv(step, world.cache, limits, "tokens", on_no_device)
        built = needed(kernel.kernels(call, limits))
        for shape in shapes_within(limits):
            names = needed([launch.spec for launch in kernel.launches(call, env, shape)])
            assert names and names <= built, (limits, shape, names - built)
            found |= names
    assert len(found) > 1


def test_an_engine_of_short_contexts_and_few_requests_holds_fewer_kernels() -> None:
    world = World(32, 8, 64, (64,), kv_dtype=FP8)
    call = world.call([(0, 0, 1)])

    def kinds(batch: int, longest: int) -> list[str]:
        built = needed(kernel.kernels(call, limits_of(world, batch, 64, longest, 5)))
        return sorted(name.split("scale.")[-1] for name in built if ".windows" not in name)

    shortest, longest = set(kinds(1, 96)), set(kinds(1, verification.MAX_CONTEXT))
    trees = {f"k2u8r{rows}.trees" for rows in (8, 16, 24)}
    assert shortest >= {"k2u8r16", "k2u8r8", "k8"} | trees
    assert not [name for name in shortest if "generation" in name or name in ("c8", "c16")]
    assert longest - shortest == {"k16"} | {f"k2u{n}r{rows}" for n in (10, 12) for rows in (8, 16)}
    more = set(kinds(1, 2 * verification.MAX_CONTEXT)) - longest
    assert more >= {"k4u8r8.trees", "c8.all", "c16.all"}
    assert set(kinds(64, 96)) - shortest >= {"c8", "c16"}

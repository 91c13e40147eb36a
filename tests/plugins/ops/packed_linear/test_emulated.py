"""prefill.cu with its threads on a CPU, whose products are those of tensor cores: the
reference's sums to the last bit, and the same bits by every tile shape."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from support import emulated_warps
from support.kernel import device_step

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits
from llmctl.plugins.backends.cuda.sm90.fp8_sums import add_products
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.ops.packed_linear.layout import unpack
from llmctl.plugins.ops.packed_linear.prefill import SLIM, Variant, prefill_launch, variants_of

FP8 = "float8_e4m3fn"
TOKENS, INNER, INTERVAL = 150, 1184, 512  # several token tiles; K ends within an interval
CASES = {
    "plain": ("packed_linear", {"outputs": 264, "out": "T", "scaling": "none"}),
    "per token with bias": (
        "packed_linear",
        {"outputs": 264, "out": "T", "scaling": "none", "x_scaling": "per_token", "bias": True},
    ),
    "swiglu": ("packed_linear_swiglu", {"hidden": 136, "scaling": "static"}),
    "rope": (
        "packed_linear_rope_kv",
        {"num_heads": 3, "num_kv_heads": 1, "head_size": 64, "kv_dtype": FP8, "scaling": "none",
         "requests": f"{TOKENS}+40"},
    ),
}  # fmt: skip


@cache
def example_of(name: str) -> Example:
    op, sizes = CASES[name]
    case = {"inner": INNER, "dtype": FP8, "model_dtype": "bfloat16", "x_scaling": "static"}
    case |= {"bias": False, "tokens": TOKENS, **sizes}
    return make_example(op, case, seed=3)


def found_by(name: str, variant: Variant, seed: int) -> list[torch.Tensor]:
    """All that a launch writes, as bytes, over a known background."""
    example = example_of(name)
    call, cache_ = example.call, example.kv_cache
    scratch: dict[str, torch.Tensor] = {}

    def room(what: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return scratch.setdefault(what, torch.zeros(shape, dtype=dtype))

    num_sms = 2 * -(-TOKENS // variant.tokens)  # 1.5 tiles for a block with an equal share
    limits = StepLimits(TOKENS, TOKENS, 1, 512, 0, cache_.shape[4], FP8, num_sms=num_sms)
    env = LaunchEnv(device_step(example.step, "cpu"), cache_, limits, "tokens", room)
    written = [*call.outputs.values(), cache_]
    for tensor in written:
        tensor.view(torch.uint8).fill_(0x55)
    launch = prefill_launch(call, env, TOKENS, variant)
    if not variant.is_even:  # several tiles for a thread block
        launch = replace(launch, grid=(2, 1, 1))
    together = launch.grid[0] if variant.is_even else 0
    emulated_warps.run([launch], seed, is_late=seed % 2 == 0, together=together)
    if variant.is_even:
        assert scratch["packed_linear.left"].any(), "no sum was left to another block"
        assert not scratch["packed_linear.is_left"].any(), "a sum that nobody took"
    return [tensor.view(torch.uint8).clone() for tensor in written]


@pytest.mark.parametrize("name", ["per token with bias", "swiglu", "rope"])
def test_every_tile_shape_gives_the_same_bits(name):
    call = example_of(name).call
    first, *others = variants_of(call)
    wanted = found_by(name, first, 1)
    assert (wanted[0] != 0x55).any()
    for seed, variant in enumerate((first, *others), 2):
        found = found_by(name, variant, seed)
        assert all(map(torch.equal, found, wanted)), variant.name


def test_a_block_that_only_completes_a_cluster_has_nothing_to_do():
    example, tokens = example_of("plain"), 100  # one token tile of five row tiles
    call, cache_ = example.call, example.kv_cache
    limits = StepLimits(TOKENS, TOKENS, 1, 512, 0, cache_.shape[4], FP8)
    step = device_step(example.step, "cpu")
    env = LaunchEnv(step, cache_, limits, "tokens", lambda *_: torch.empty(0))
    launch = prefill_launch(call, env, tokens, SLIM)
    assert launch.grid == (6, 1, 1) and launch.spec.cluster == 2
    (wanted, *_) = found_by("plain", SLIM, 1)
    call.outputs["out"].view(torch.uint8).fill_(0x55)
    emulated_warps.run([launch], 1)
    found = call.outputs["out"].view(torch.uint8)
    assert torch.equal(found[:tokens], wanted[:tokens]) and (found[tokens:] == 0x55).all()


def test_sums_are_those_of_tensor_cores_in_intervals():
    example = example_of("plain")
    inputs = example.call.inputs
    x = inputs["x"][:TOKENS]
    weight = unpack(inputs["weight"], 264, INNER)
    sums = torch.zeros(TOKENS, 264)
    for first in range(0, INNER, INTERVAL):
        own = slice(first, min(first + INTERVAL, INNER))
        sums += add_products(torch.zeros(TOKENS, 264), x[:, own], weight[:, own])
    scaled = sums * (inputs["x_scale"] * inputs["weight_scale"][:264])
    (out, *_) = found_by("plain", SLIM, 1)
    assert torch.equal(out.view(torch.bfloat16)[:TOKENS], scaled.bfloat16())

"""generation.cu gives the bits of the context kernel, whatever the step and the context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attention_support import FP8, Part, World, same_bits

from llmctl.plugins.cuda.compiler import compile_kernel
from llmctl.plugins.cuda.driver import cuda_driver
from llmctl.plugins.cuda.kernel import Launch
from llmctl.plugins.paged_attention import generation, kernel

WORLDS = [
    {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (1500, 333), "kv_dtype": FP8},
    {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (6000, 700), "kv_dtype": FP8},
    {"heads": 32, "kv_heads": 8, "size": 128, "lengths": (1500, 333)},
    {"heads": 32, "kv_heads": 8, "size": 64, "lengths": (2600, 500), "kv_dtype": FP8},
    {"heads": 4, "kv_heads": 2, "size": 128, "lengths": (1300, 500), "tokens_per_block": 8},
    {"heads": 7, "kv_heads": 1, "size": 64, "lengths": (1300, 500), "tokens_per_block": 128},
]
POSITIONS = (0, 1, 5, 62, 63, 64, 65, 127, 128, 511, 512, 1023, 1024, 1087, 1151, 1152)

_loaded: dict[str, object] = {}


def execute(launches: Sequence[Launch]) -> None:
    for launch in launches:
        name = launch.spec.name
        if name not in _loaded:
            _loaded[name] = cuda_driver().load(compile_kernel(launch.spec))
        stream = torch.cuda.current_stream().cuda_stream
        cuda_driver().prepare(_loaded[name], launch.grid, launch.arguments, True)(stream)
    torch.cuda.synchronize()


def steps(length: int, other: int) -> list[list[Part]]:
    """Short requests at the borders of tiles and units, and batches of them."""
    ways: list[list[Part]] = [[(0, p, 1)] for p in (*POSITIONS, length - 1)]
    for count in (2, 5, 8, 11, 16, 17):
        ways += [[(0, p, count)] for p in (0, 30, 60, 500, 1015, 1024, 1030, length - count)]
    ways += [[(0, length - 11, 11), (1, other - 5, 5)], [(1, other - 1, 1), (0, length // 2, 17)]]
    return ways


def few(world: World, parts: list[Part], cluster: int) -> list[torch.Tensor] | None:
    """The rows of a step with padding by generation.cu; None if it has no room for the step."""
    step, call = world.step(parts), world.call(parts, 3)
    env, most = world.env(step, 2), max(count for _, _, count in parts)
    num_blocks = -(-most // (generation.ROWS // (world.heads // world.kv_heads)))
    cut = generation.Cut(cluster, num_blocks, -(-most // num_blocks))
    launch = generation.generation_launch(
        call,
        env,
        cut,
        step.num_requests + 2,
        kernel._tensors(call, env),
        kernel._partials(call, env)[0],
        kernel._logit_scale(call),
        kernel.SHORT,
    )
    if launch is None:
        return None
    execute([launch])
    out = call.outputs["out"]
    assert (out[-3:].view(torch.uint8) == 0x55).all(), "padding was written"
    return list(out[:-3].split([count for _, _, count in parts]))


@pytest.mark.parametrize("quantize_out", [False, True])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_generation_gives_the_bits_of_the_context_kernel(world, quantize_out):
    quantize_out = quantize_out and world.get("kv_dtype") == FP8
    made = World(**world, quantize_out=quantize_out, device="cuda", spread=2.0)
    wanted = [made.run([(r, 0, n)], execute)[0] for r, n in enumerate(made.lengths)]
    served = 0
    for parts in steps(*made.lengths):
        for cluster in generation.CLUSTERS:
            found = few(made, parts, cluster)
            for (request, start, count), rows in zip(parts, found or [], strict=found is not None):
                served += 1
                assert same_bits(rows, wanted[request][start : start + count]), (parts, cluster)
    assert served > 100

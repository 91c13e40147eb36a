"""chunk.cu gives the bits of the Triton context kernel, however prompts are cut into chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention import FP8, Part, World, run_one, same_bits, with_outputs
from support.gpu import execute

from llmctl.plugins.ops.paged_attention import kernel, launch_arguments
from llmctl.plugins.ops.paged_attention.chunk import chunk

LENGTHS = (5000, 1500, 333, 64, 1)
WORLDS = [
    {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "spread": 3.0},
    {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "tokens_per_block": 64},
    {"heads": 32, "kv_heads": 8, "size": 128},
    {"heads": 28, "kv_heads": 4, "size": 128, "dtype": torch.float16, "kv_dtype": torch.float16},
    {"heads": 4, "kv_heads": 2, "size": 128, "tokens_per_block": 8},
    {"heads": 7, "kv_heads": 1, "size": 128, "tokens_per_block": 128},
    {"heads": 24, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "tokens_per_block": 8},
    {"heads": 3, "kv_heads": 3, "size": 128, "kv_dtype": FP8, "tokens_per_block": 128},
    {"heads": 64, "kv_heads": 1, "size": 128, "dtype": torch.float16, "kv_dtype": FP8},
]
STEPS: list[list[Part]] = [
    [(r, 0, n) for r, n in enumerate(LENGTHS)],
    [(0, 0, 2048)],
    [(0, 2048, 2048)],
    [(0, 1000, 65), (1, 63, 129), (2, 64, 64)],
    [(0, 4999, 1), (1, 1, 1499), (0, 17, 18), (2, 5, 300)],
    [(0, p, 1) for p in range(0, 600, 3)] + [(1, 700, 500)] + [(2, p, 2) for p in range(60, 70)],
]


def by_triton(world: World, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every request in one step of its own."""
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "covers_chunks", lambda call, limits: False)
        return [world.run([(r, 0, n)], execute)[0] for r, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize(("world", "quantize_out"), with_outputs(WORLDS), ids=str)
def test_chunks_have_the_bits_of_the_triton_kernel(world, quantize_out, by_images, monkeypatch):
    """By images: tiles are converted before, some KV heads at a time. Of calls that say that only
    the ends of requests are read, no more than these are written."""
    monkeypatch.setattr(chunk, "_LONG", 1 if by_images else 1 << 30)
    monkeypatch.setattr(chunk, "_MANY_BLOCKS", 0)
    monkeypatch.setattr(chunk, "_image_bytes", lambda call, limits: 64 << 20)
    made = World(
        **world, lengths=LENGTHS, quantize_out=quantize_out, device="cuda", max_batch_size=256
    )
    wanted = by_triton(made, monkeypatch)
    for parts in STEPS:
        for min_tokens, ends_only in ((1, False), (2, False), (19, False), (1, True), (19, True)):
            step = made.step(parts)
            call, env = made.call(parts, 3), made.env(step, 2)
            call = replace(call, attributes={**call.attributes, "ends_only": ends_only})
            kept = chunk.kept_tokens(call, env.limits) or max(LENGTHS)
            launches = chunk.chunk_launches(
                call,
                env,
                made.shape(
                    step, num_tokens=step.num_tokens + 3, num_requests=step.num_requests + 2
                ),
                launch_arguments.own_tensors(call, env),
                launch_arguments.partials(call, env)[1],
                launch_arguments.logit_scale(call),
                min_tokens,
            )
            assert len(parts) > 9 or (len(launches) > 1) == by_images
            rows = run_one(launches[0], call, env, parts, lambda _, found=launches: execute(found))
            for (request, start, count), found in zip(parts, rows, strict=True):
                left = max(count - kept, 0) if count >= min_tokens else count
                assert (found[:left].view(torch.uint8) == 0x55).all(), "nobody's, or another's"
                right = wanted[request][start + left : start + count]
                assert same_bits(found[left:], right), (request, start, count, min_tokens)


@pytest.mark.parametrize("world", WORLDS[:4], ids=str)
def test_many_items_are_each_taken_once(world, monkeypatch):
    """More blocks of tokens than thread blocks, many times in a row."""
    made = World(**world, lengths=LENGTHS, device="cuda")
    wanted = by_triton(made, monkeypatch)
    for _ in range(20):
        found = made.run([(r, 0, n) for r, n in enumerate(LENGTHS)], execute)
        for one, right in zip(found, wanted, strict=True):
            assert same_bits(one, right)

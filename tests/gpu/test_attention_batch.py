"""batch.cu gives the bits of the context kernel, whatever shares the step and however contexts are
cut into parts."""

from __future__ import annotations

import pytest
import torch
from support.attention import FP8, INT8, Part, World, run_one, same_bits, with_outputs
from support.gpu import execute

from llmctl.plugins.ops.paged_attention import kernel, launch_arguments
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.tree import tree

LENGTHS = (6000, 1500, 333)
WORLDS = [
    {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": FP8},
    {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "spread": 3.0},
    {"heads": 32, "kv_heads": 8, "size": 64, "kv_dtype": FP8},
    {"heads": 32, "kv_heads": 8, "size": 128},
    {"heads": 28, "kv_heads": 4, "size": 128, "dtype": torch.float16, "kv_dtype": torch.float16},
    {"heads": 16, "kv_heads": 1, "size": 64, "tokens_per_block": 128},
    {"heads": 8, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "tokens_per_block": 8},
    {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": INT8},
    {"heads": 10, "kv_heads": 2, "size": 64, "kv_dtype": INT8, "tokens_per_block": 64},
]
POSITIONS = (0, 1, 15, 62, 63, 64, 127, 128, 511, 1023, 1024, 1087, 1152, 2047, 2048, 2303, 4096)


def steps(group: int) -> list[list[Part]]:
    """One token at the borders of tiles, units and parts; then as many as the columns hold."""
    ways: list[list[Part]] = [[(0, p, 1) for p in POSITIONS] + [(0, LENGTHS[0] - 1, 1)]]
    ways[0] += [(1, LENGTHS[1] - 1, 1), (2, LENGTHS[2] - 1, 1)]
    for tokens in {8 // group, 16 // group} - {0, 1}:
        ways.append([(0, p, tokens) for p in POSITIONS])
        ways[-1] += [(2, 100, 1), (1, 700, tokens - 1 or 1)]
    return ways


@pytest.mark.parametrize(
    ("warps", "part_tiles", "many"),
    [(1, 4, True), (1, 32, False), (7, 0, False), (60, 0, True), (66, 0, False)],
)
@pytest.mark.parametrize(("world", "quantize_out"), with_outputs(WORLDS), ids=str)
def test_batch_gives_the_bits_of_the_context_kernel(
    world, quantize_out, warps, part_tiles, many, monkeypatch
):
    monkeypatch.setattr(batch, "are_many", lambda *_: many)
    monkeypatch.setattr(batch, "_num_warps", lambda *_: warps)
    monkeypatch.setattr(batch, "_part_tiles", lambda *_: part_tiles)
    made = World(**world, lengths=LENGTHS, quantize_out=quantize_out, device="cuda")
    wanted = [made.run([(r, 0, n)], execute)[0] for r, n in enumerate(LENGTHS)]
    for parts in steps(made.heads // made.kv_heads):
        call, env = made.call(parts, 3), made.env(made.step(parts), 2)
        most = max(count for _, _, count in parts)
        launch = batch.batch_launch(
            call,
            env,
            len(parts) + 2,
            most,
            LENGTHS[0],
            launch_arguments.own_tensors(call, env),
            launch_arguments.partials(call, env),
            launch_arguments.logit_scale(call),
        )
        rows = run_one(launch, call, env, parts, execute)
        for (request, start, count), found in zip(parts, rows, strict=True):
            assert same_bits(found, wanted[request][start : start + count]), (request, start, count)


@pytest.mark.parametrize("world", WORLDS[:4], ids=str)
def test_requests_of_a_mixed_step_are_each_served_by_one_kernel(world):
    """Chunks, single tokens and requests of a few tokens, in a step that is busy."""
    made = World(**world, lengths=LENGTHS, device="cuda")
    wanted = [made.run([(r, 0, n)], execute)[0] for r, n in enumerate(LENGTHS)]
    parts: list[Part] = [(0, 17 * i, 1) for i in range(40)] + [
        (0, 300, 500),
        (1, 40, 3),
        (2, 0, 333),
    ]
    parts += [(1, 1000, 17), (1, 1100, 18), (1, 5, 2)]
    step, call = made.step(parts), made.call(parts)
    names = [each.spec.name for each in kernel.launches(call, made.env(step), made.shape(step))]
    assert [name.split(".")[1] for name in names] == [
        "chunk" if made.size == 128 else "context",
        "batch",
    ]
    for (request, start, count), found in zip(parts, made.run(parts, execute), strict=True):
        assert same_bits(found, wanted[request][start : start + count]), (request, start, count)


@pytest.mark.parametrize("heads", [64, 32, 8])
@pytest.mark.parametrize("tokens", [1, 2, 11, 17])
def test_many_chains_get_the_bits_of_the_context_kernel(heads, tokens):
    """tree.cu, with chains alone."""
    world = {"heads": heads, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "quantize_out": True}
    made = World(**world, lengths=(4200,), device="cuda")
    wanted = made.run([(0, 0, 4200)], execute)[0]
    parts: list[Part] = [(0, p, tokens) for p in POSITIONS[:-1]]
    call, env = made.call(parts, 3), made.env(made.step(parts), 2)
    launch = tree.tree_launch(
        call,
        env,
        len(parts) + 2,
        tokens,
        launch_arguments.own_tensors(call, env),
        launch_arguments.logit_scale(call),
        17,
        has_trees=False,
    )
    rows = run_one(launch, call, env, parts, execute)
    for (_, start, count), found in zip(parts, rows, strict=True):
        assert same_bits(found, wanted[start : start + count]), (start, count)

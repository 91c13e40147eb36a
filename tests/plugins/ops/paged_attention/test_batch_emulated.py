"""batch.cu where warps share a context, which they merge together or the last of them alone, thread
by thread on a CPU: the bits of one warp that attends to all of it, and numbers that are near those
of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support import emulated_warps
from support.attention import FP8, Part, World, run_one, same_bits
from support.attention_reference import is_near_reference

from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention import launch_arguments
from llmctl.plugins.ops.paged_attention.batch import batch

BOUND = 1 << 14  # tokens of a context, as far as a launch knows
# Tokens of a request, lengths of contexts, and how many warps share them: fewer than there are
# lines of sums, a number that lines are no multiple of, and more, some of which do not merge; so
# many that each context has the same number of parts, and others: a warp has parts of several.
WORLDS = [
    (
        {"heads": 8, "kv_heads": 1, "size": 128, "quantize_out": True},
        *(1, (4200, 1100, 70, 2500), (2, 5, 7, 16)),
    ),
    ({"heads": 8, "kv_heads": 2, "size": 128, "tokens_per_block": 64}, 3, (1600, 300), (3, 8)),
    ({"heads": 4, "kv_heads": 1, "size": 64, "tokens_per_block": 8}, 2, (9000,), (16, 32)),
    ({"heads": 4, "kv_heads": 1, "size": 64}, 1, (700,) * 34 + (2048, 5), (41, 7, 36)),
    ({"heads": 4, "kv_heads": 1, "size": 64}, 1, (2048,) * 4, (16, 9, 2)),
]


def launch_of(
    call: OpCall, env: LaunchEnv, requests: int, most: int, warps: int, part_tiles: int
) -> Launch:
    """By so many warps of each KV head together, or in parts of so many tiles."""
    with (
        mock.patch.object(batch, "_num_warps", lambda *_: warps),
        mock.patch.object(batch, "_part_tiles", lambda *_: part_tiles),
    ):
        return batch.batch_launch(
            *(call, env, requests, most, BOUND),
            *(launch_arguments.own_tensors(call, env), launch_arguments.partials(call, env)),
            launch_arguments.logit_scale(call),
        )


@pytest.mark.parametrize(("sizes", "tokens", "lengths", "shares"), WORLDS, ids=str)
def test_contexts_that_several_warps_share_have_the_bits_of_one(sizes, tokens, lengths, shares):
    world = World(
        **sizes, kv_dtype=FP8, lengths=lengths, spread=2.0, max_batch_size=64, max_seq_len=BOUND
    )
    parts: list[Part] = [(r, length - tokens, tokens) for r, length in enumerate(lengths)]
    found = []
    ways = [(1, BOUND, 0), *((warps, 0, 0) for warps in shares), (1, 5, 0), (1, 32, 0)]
    for seed, (warps, part_tiles, room) in enumerate([*ways, (shares[0], 0, shares[0] + 2)]):

        def execute(launches: Sequence[Launch], seed: int = seed) -> None:
            at_once = launches[0].grid[0] * bool(launches[0].spec.constants["TOGETHER"])
            emulated_warps.run(launches, seed, is_late=seed % 2 == 0, together=at_once)

        call, env = world.call(parts, 2), world.env(world.step(parts), 1)
        launch = launch_of(call, env, len(parts) + seed % 2, tokens, warps, part_tiles)
        assert launch.spec.constants["TOGETHER"] == (warps > 1)
        if room and launch.spec.constants["SEVERAL"]:  # too little for work items
            launch = replace(launch, arguments=(*launch.arguments[:-1], room))
        found.append(torch.cat(run_one(launch, call, env, parts, execute)))
        assert same_bits(found[-1], found[0]), (warps, part_tiles, room)
        assert not any(x.any() for name, x in world.scratch.items() if name.endswith("counters"))
    assert is_near_reference(world, parts, found[0])

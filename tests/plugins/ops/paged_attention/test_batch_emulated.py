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
# Tokens of a request, lengths of contexts, and by how many warps these are shared: fewer than there
# are lines of sums, a number that lines are no multiple of, and more, some of which do not merge.
# Contexts shorter than the longest have fewer parts, and the shortest is not divided.
WORLDS = [
    ({"heads": 16, "kv_heads": 2, "size": 128, "quantize_out": True}, 1, (4200, 1100, 70), (2, 5)),
    ({"heads": 8, "kv_heads": 2, "size": 128, "tokens_per_block": 64}, 3, (1600, 300), (3,)),
    ({"heads": 4, "kv_heads": 1, "size": 64, "tokens_per_block": 8}, 2, (9000,), (18,)),
]


def launch_of(
    call: OpCall, env: LaunchEnv, requests: int, most: int, splits: int, *, together: bool
) -> Launch:
    """Contexts in so many parts at most. together: of warps that wait for each other."""
    with (
        mock.patch.object(batch, "_part_tiles", lambda *_: BOUND // batch.KEYS // splits),
        mock.patch.object(batch, "is_long", lambda *_: together),
    ):
        launch = batch.batch_launch(
            *(call, env, requests, most, BOUND),
            *(launch_arguments.own_tensors(call, env), launch_arguments.partials(call, env)),
            launch_arguments.logit_scale(call),
        )
    return replace(launch, grid=(splits, *launch.grid[1:]))


@pytest.mark.parametrize(("sizes", "tokens", "lengths", "shares"), WORLDS, ids=str)
def test_contexts_that_several_warps_share_have_the_bits_of_one(sizes, tokens, lengths, shares):
    world = World(
        **sizes, kv_dtype=FP8, lengths=lengths, spread=2.0, max_batch_size=4, max_seq_len=BOUND
    )
    parts: list[Part] = [(r, length - tokens, tokens) for r, length in enumerate(lengths)]
    found = []
    ways = [(1, False), *((splits, True) for splits in shares), (shares[-1], False)]
    for seed, (splits, together) in enumerate(ways):
        at_once = splits if together else 1

        def execute(launches: Sequence[Launch], seed: int = seed, at_once: int = at_once) -> None:
            emulated_warps.run(launches, seed, is_late=seed % 2 == 0, together=at_once)

        call, env = world.call(parts, 2), world.env(world.step(parts), 1)
        launch = launch_of(call, env, len(parts) + 1, tokens, splits, together=together)
        assert launch.spec.constants["TOGETHER"] == together
        found.append(torch.cat(run_one(launch, call, env, parts, execute)))
        assert same_bits(found[-1], found[0]), (splits, together)
    assert is_near_reference(world, parts, found[0])

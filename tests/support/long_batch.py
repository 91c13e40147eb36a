"""Steps of long_batch.cu whose contexts are divided as a test likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llmctl.plugins.ops.paged_attention import batch, long_batch
from llmctl.plugins.ops.paged_attention.launch_arguments import logit_scale, own_tensors, partials
from llmctl.plugins.ops.paged_attention.tiles import KEYS
from support.attention import Execute, Part, World, run_one

BOUND = batch.LONG + 1  # tokens of a context, as far as a launch knows


def attend_long_batch(
    world: World,
    parts: Sequence[Part],
    execute: Execute,
    splits: int = 0,
    *,
    has_trees: bool = False,
    bound: int = BOUND,
) -> list[torch.Tensor]:
    """The rows of the parts where so many thread blocks share a context (0: as many as a step
    chooses), with two tokens and one request of padding."""
    step, call = world.step(parts), world.call(parts, 2)
    env = replace(world.env(step, 1), use_pdl=True)
    counts = {"num_tokens": step.num_tokens + 2, "num_requests": step.num_requests + 1}
    shape = world.shape(step, max_kv_len=bound, **counts)
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    launch = long_batch.long_batch_launch(
        call, env, shape, *own, long_batch.MAX_TREE, has_trees=has_trees
    )
    assert launch is not None
    if splits:
        entries = long_batch.most_entries(-(-bound // KEYS), splits, has_trees)
        at = launch.spec.arguments.index("i32") + 3
        arguments = [*launch.arguments[:at], entries, *launch.arguments[at + 1 :]]
        launch = replace(launch, grid=(splits, *launch.grid[1:]), arguments=tuple(arguments))
    return run_one(launch, call, env, parts, execute)

"""Steps of long.cu and long_batch.cu whose rows and contexts are divided as a test likes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import torch

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.launch_arguments import (
    logit_scale,
    own_tensors,
    partials,
)
from llmctl.plugins.ops.paged_attention.long import long
from llmctl.plugins.ops.paged_attention.long_batch import long_batch
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS
from support.attention import Execute, Part, World, run_one

BOUND = batch.LONG + 1  # tokens of a context, as far as a launch knows
BLOCK_ROWS = tuple(each.rows for each in long.VARIANTS)  # of thread blocks of long.cu


def attend_long(
    world: World,
    parts: Sequence[Part],
    execute: Execute,
    splits: int = 0,
    *,
    rows: int = BLOCK_ROWS[-1],
    has_trees: bool = False,
    bound: int = BOUND,
    ranges: int = 1,
    room: int | None = None,
    helped: bool = False,
) -> list[torch.Tensor]:
    """The rows of the parts where a thread block has `rows` of them (of long_batch.cu, if long.cu
    has no such binary) and so many share a context, of long.cu for each on average (0: as many as a
    step chooses), with two tokens and one request of padding. ranges: of all tiles, where nobody
    shares one. room: for that many stored work items of a KV head and a block of rows. helped:
    others help with the beginning of the only request's context."""
    step, call = world.step(parts), world.call(parts, 2)
    env = replace(world.env(step, 1), use_pdl=True)
    counts = {"num_tokens": step.num_tokens + 2, "num_requests": step.num_requests + (not helped)}
    shape = world.shape(step, max_kv_len=bound, **counts)
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    kernel = long if rows in BLOCK_ROWS else long_batch
    launch: Launch | None
    with mock.patch.object(kernel, "VARIANTS", [v for v in kernel.VARIANTS if v.rows == rows]):
        if kernel is long:
            launch = long.long_launch(call, env, shape, *own, long.MAX_TREE, has_trees=has_trees)
        else:
            with mock.patch.object(long_batch, "_has_its_rows", lambda tokens, group: True):
                launch = long_batch.long_batch_launch(
                    call, env, shape, *own, long.MAX_TREE, within_us=math.inf
                )
    assert launch is not None
    if splits and kernel is long:
        (variant,) = [v for v in long.VARIANTS if v.rows == rows]
        alone = splits == 1 and variant.warpgroups == 1 and not has_trees
        spec = long.long_spec(call, env.limits, variant, has_trees=has_trees, alone=alone)
        at = spec.arguments.index("i32") + 3
        heads, requests = int(call.attributes["num_kv_heads"]), counts["num_requests"]
        heads *= -(-max(count for *_, count in parts) // launch.arguments[at - 2])  # blocks of rows
        grid = (splits * requests, heads, 1) if splits > 1 else (1, heads, requests)
        grid = (ranges, 1, 1) if alone else grid
        grid = (splits * heads + heads // 2, 1, 1) if helped else grid
        room = launch.arguments[at] if room is None else room
        arguments = (*launch.arguments[:at], room, *launch.arguments[at + 1 :])
        launch = replace(launch, spec=spec, grid=grid, arguments=arguments)
    elif splits:
        entries = long_batch.most_entries(-(-bound // KEYS), splits)
        launch = replace(
            launch,
            grid=(splits, *launch.grid[1:]),
            arguments=(*launch.arguments[:-1], entries),
        )
    return run_one(launch, call, env, parts, execute)

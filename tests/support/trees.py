"""Trees of drafted tokens, and the same path as a plain chain."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from llmctl.plugins.core.calls import Trees
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.runtime.step import find_paths
from support.attention import FP8, INT8, Execute, World, same_bits

LENGTHS = (400, 60, 90)
WORLDS: dict[str, dict[str, Any]] = {
    "128, FP8": {"heads": 8, "kv_heads": 1, "size": 128, "kv_dtype": FP8, "quantize_out": True},
    "64, FP8": {"heads": 4, "kv_heads": 2, "size": 64, "kv_dtype": FP8},
    "64, INT8, float16": {
        "heads": 4, "kv_heads": 2, "size": 64, "dtype": torch.float16, "kv_dtype": INT8,
    },
    "80, bfloat16, window": {"heads": 2, "kv_heads": 2, "size": 80, "window": 70},
    "96, float16, sinks": {
        "heads": 6, "kv_heads": 2, "size": 96, "dtype": torch.float16, "kv_dtype": torch.float16,
        "window": 100, "sinks": 6, "tokens_per_block": 16,
    },
}  # fmt: skip

Rows = dict[tuple[int, tuple[int, ...]], torch.Tensor]  # by root and path, of its last token

# Parents as in `Drafts`: -1 follows the root.
SHAPES: dict[str, list[int]] = {
    "a star": [-1] * 6,
    "two branches": [-1, 0, 1, -1, 3, 4],
    "a path at the highest places": [-1] * 5 + [4, 5, 6, 7],
    "interleaved": [-1, -1, 0, 1, 2, 3, 4, 5],
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
    "a chain": [-1, 0, 1, 2],
}


def world_of(name: str, parents: list[int], kind: type[World] = World) -> World:
    """One of WORLDS, whose request 0 may have a tree."""
    return kind(**{"lengths": LENGTHS, **WORLDS[name]}, trees={0: parents}, spread=2.0)


def random_parents(num_drafts: int, seed: int) -> list[int]:
    """Parents anywhere before their children."""
    draw = random.Random(seed)
    return [draw.randrange(-1, index) for index in range(num_drafts)]


def along(world: World, root: int, path: Sequence[int]) -> World:
    """The request of a tree whose keys and queries begin at `root`, as if the tokens of `path`
    (the root is 0) had been decoded one after the other."""
    plain = replace(deepcopy(world), trees={}, scratch={})
    plain.cache, plain.queries = world.cache.clone(), [q.clone() for q in world.queries]

    def place(position: int) -> tuple[int, int]:
        block, offset = divmod(position, world.tokens_per_block)
        return int(world.tables[0, block]), offset

    raw, source = plain.cache.view(torch.uint8), world.cache.view(torch.uint8)
    for depth, token in enumerate(path):
        (block, offset), (from_block, from_offset) = place(root + depth), place(root + token)
        raw[:, block, :, :, offset] = source[:, from_block, :, :, from_offset]
        plain.queries[0][root + depth] = world.queries[0][root + token]
    return plain


def differing_tokens(
    world: World,
    root: int,
    execute: Execute,
    beside: bool = False,
    decoded: Rows | None = None,
    padding: tuple[int, int] = (3, 2),
) -> list[int]:
    """Tokens of request 0's tree whose bits are not those of decoding their paths token by token;
    with `beside`, requests 1 and 2 are in the step, a chain of five and a prompt. `decoded` keeps
    what paths gave, for other trees in the same world; `padding` is in tokens and requests."""
    rows = {} if decoded is None else decoded
    count = 1 + len(world.trees[0])
    parts = [(0, root, count)]
    if beside:
        parts = [(2, 0, 80), (0, root, count), (1, 20, 5)]
    found = world.run(parts, execute, padding)[beside]
    return _differing(world, root, range(count), found, execute, rows)


def differing_chosen(
    world: World, root: int, chosen: Sequence[int], execute: Execute, decoded: Rows | None = None
) -> list[int]:
    """The same of some tokens of the tree in a step of their own, as if earlier steps had stored
    the root and the others."""
    part, at = [(0, root, 1 + len(world.trees[0]))], np.array(chosen)
    whole, call = world.step(part), world.call(part)
    assert whole.trees is not None
    roots = np.array([root], np.int32)
    step = replace(
        whole,
        token_ids=whole.token_ids[at],
        position_ids=whole.position_ids[at],
        slot_mapping=whole.slot_mapping[at],
        cu_q=np.array([0, len(at)], np.int32),
        trees=Trees(np.zeros(1, np.int32), whole.trees.paths[at], roots),
    )
    q = call.inputs["q"][torch.from_numpy(at)].contiguous()
    out = call.outputs["out"][: len(at)]
    own = replace(call, inputs={**call.inputs, "q": q}, outputs={"out": out})
    execute(kernel.launches(own, world.env(step), world.shape(step)))
    return _differing(world, root, chosen, out, execute, {} if decoded is None else decoded)


def _differing(
    world: World,
    root: int,
    tokens: Iterable[int],
    found: torch.Tensor,
    execute: Execute,
    rows: Rows,
) -> list[int]:
    paths, depths = find_paths(world.trees[0])
    wrong = []
    for row, token in enumerate(tokens):
        depth = int(depths[token])
        path = tuple(paths[token, : depth + 1].tolist())
        if (root, path) not in rows:
            plain = along(world, root, path)
            (rows[root, path],) = plain.run([(0, root + depth, 1)], execute)
        if not same_bits(found[row : row + 1], rows[root, path]):
            wrong.append(token)
    return wrong

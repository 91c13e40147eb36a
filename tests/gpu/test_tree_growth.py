"""The kernels of trees that grow in rounds on a GPU, compared with their references."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import execute
from support.growth_rounds import Round, random_logits, random_round

from llmctl.plugins.device_loop import tree_reference
from llmctl.plugins.ops.tree_growth import kernel, reference
from llmctl.plugins.ops.tree_growth.arrays import TreeShape

# requests, drafts, vocabulary, tree
CASES = [
    (1, 31, 128256, TreeShape(10, 10, 8)),
    (1, 16, 151936, TreeShape(3, 3, 6)),
    (8, 63, 32000, TreeShape(16, 16, 8)),
    (64, 24, 4096, TreeShape(4, 4, 6)),
    (5, 100, 5000, TreeShape(2, 7, 30)),
    (3, 24, 5000, TreeShape(2, 1, 12)),
]


def on_device(made: Round) -> Round:
    """A copy whose tensors are on the GPU."""
    other = made.copy()
    for name in ("state", "trees", "step", "arrays"):
        setattr(other, name, _moved(getattr(other, name), "cuda"))
    other.state = replace(other.state, sampling=_moved(other.state.sampling, "cuda"))
    return other


def _moved(owner: Any, device: str) -> Any:
    found = {field.name: getattr(owner, field.name) for field in fields(owner)}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return replace(owner, **{name: value.to(device) for name, value in tensors.items()})


def on_host(made: Round) -> Round:
    """The other way."""
    other = made.copy()
    for name in ("state", "trees", "step", "arrays"):
        setattr(other, name, _moved(getattr(other, name), "cpu"))
    return other


@pytest.mark.parametrize(("batch", "draft_len", "vocab", "shape"), CASES, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_levels_and_moves_equal_the_reference(
    batch: int, draft_len: int, vocab: int, shape: TreeShape, ties: bool
) -> None:
    for seed in range(2):
        used = batch if seed else max(1, batch - 3)
        wanted = random_round(shape, batch, draft_len, used, seed, vocab)
        found, seeded = on_device(wanted), np.random.default_rng(seed)
        for level in range(shape.levels(draft_len)):
            rows = used * (shape.width if level else 1)
            logits = random_logits(seeded, (rows, vocab), ties)
            drawn = torch.from_numpy(seeded.integers(0, 9, len(wanted.arrays.drawn)))
            found.arrays.drawn.copy_(drawn)
            wanted.arrays.drawn.copy_(drawn)
            options = {"is_root": level == 0, "num_ids": vocab - 7 * seed}
            execute(kernel.offer(logits.cuda(), found.arrays, rows, **options))
            reference.offer(logits, wanted.arrays, rows, **options)
            assert torch.equal(found.arrays.ids[:rows].cpu(), wanted.arrays.ids[:rows])
            values = found.arrays.values[:rows].cpu()
            torch.testing.assert_close(values, wanted.arrays.values[:rows], atol=2e-5, rtol=1e-5)
            found.arrays.values.copy_(wanted.arrays.values)  # sums have another order there
            execute([kernel.grow(*found.described, draft_len, level, of_pairs=False)])
            reference.grow(*wanted.described, draft_len, level, of_pairs=False)
            on_host(found).assert_same(wanted)
        _accept_any(wanted, seeded)
        found.trees.rows.copy_(wanted.trees.rows)
        found.state.committed.copy_(wanted.state.committed)
        found.state.max_len.copy_(wanted.state.max_len)
        execute([kernel.list_moves(*found.described, draft_len)])
        reference.list_moves(*wanted.described, draft_len)
        on_host(found).assert_same(wanted)


def _accept_any(made: Round, seeded: np.random.Generator) -> None:
    """As if some node of each tree had been accepted."""
    made.state.max_len.copy_(made.state.committed + 50)
    for request in range(made.batch):
        count = tree_reference._num_tokens(made.state, made.trees, request, made.draft_len)
        node = int(seeded.integers(0, count)) if count else 0
        made.trees.rows[request] = request * (made.draft_len + 1) + node
        depth = len(tree_reference._path_to(made.trees, request, node)) - 1
        made.state.committed[request] += (depth + 1) * bool(count)

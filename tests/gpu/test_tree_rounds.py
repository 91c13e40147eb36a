"""The bookkeeping kernels of rounds with trees on a GPU, compared with their references."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.gpu import execute
from support.round_state import assert_same, clone, make_step, random_trees

from llmctl.plugins.device_loop import tree_kernel as kernel
from llmctl.plugins.device_loop import tree_reference as reference
from llmctl.plugins.device_loop.state import RoundState

SIZES = [(1, 1), (1, 21), (8, 63), (64, 63), (16, 255), (100, 10)]  # requests, drafts
SEEDS = 6


def on_device(owner: Any) -> Any:
    """A dataclass whose tensors, those of its dataclasses too, are on the GPU."""
    moved = {}
    for field in fields(owner):
        value = getattr(owner, field.name)
        moved[field.name] = value.cuda() if isinstance(value, torch.Tensor) else on_device(value)
    return replace(owner, **moved)


def on_host(owner: Any) -> Any:
    """The other way, tensors of its own alone."""
    names = [f.name for f in fields(owner) if isinstance(getattr(owner, f.name), torch.Tensor)]
    return replace(owner, **{name: getattr(owner, name).cpu() for name in names})


@pytest.mark.parametrize(("batch", "draft_len"), SIZES, ids=str)
def test_rounds_of_trees_equal_the_reference(batch: int, draft_len: int) -> None:
    """Several rounds one after the other on one state, with fresh targets in each."""
    for seed in range(SEEDS):
        state, trees, limits = random_trees(batch, draft_len, seed)
        step = make_step(limits)
        found, found_trees, found_step = map(on_device, (state, trees, step))
        used = batch if seed % 3 else max(1, batch - 3)
        length = draft_len if seed % 2 else max(1, draft_len // 2)
        for turn in range(3):
            targets = torch.randint(0, 2, state.targets.shape, dtype=torch.int32)
            state.targets.copy_(targets)
            found.targets.copy_(targets.cuda())
            execute([
                kernel.verify_tree(found, found_trees, found_step, limits, used, length),
                kernel.accept_tree(found, found_trees, found_step, limits, used, length),
            ])  # fmt: skip
            reference.verify_tree(state, trees, step, limits, used, length)
            reference.accept_tree(state, trees, step, limits, used, length)
            where = f"seed {seed}, round {turn}"
            for mine, wanted in ((found, state), (found_trees, trees), (found_step, step)):
                try:
                    assert_same(on_host(mine), clone(wanted))
                except AssertionError as error:
                    raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("vocab", [10, 4096, 32000, 128256, 151936])
def test_trees_are_filled_with_the_likeliest_tokens(vocab: int) -> None:
    """Few distinct logits, so that many ids tie, and NaN."""
    generator = torch.Generator().manual_seed(vocab)
    for batch, draft_len, num_heads, count in ((1, 63, 4, 10), (16, 21, 2, 3), (5, 100, 5, 10)):
        logits = [torch.randn(batch, vocab, generator=generator) for _ in range(num_heads)]
        for head in logits[1:]:
            head.mul_(2).round_()
            head[0, vocab // 2] = torch.nan
        heads, ranks = (
            torch.randint(most, (draft_len,), generator=generator, dtype=torch.int32)
            for most in (num_heads, count)
        )
        wanted = RoundState.allocate(batch, draft_len, "cpu")
        reference.fill_tree(logits, heads, ranks, wanted, batch, draft_len)
        found = RoundState.allocate(batch, draft_len, "cuda")
        size = kernel.num_keys(batch, kernel.num_chunks(vocab), count)
        keys = torch.full((num_heads, size), -7, dtype=torch.int64, device="cuda")
        rows = kernel.HeadLogits.of([head.cuda() for head in logits])
        nodes = kernel.StaticNodes(heads.cuda(), ranks.cuda())
        execute([
            kernel.list_top(rows, keys, batch, count),
            kernel.fill_tree(keys, nodes, found, batch, draft_len, count, vocab),
        ])  # fmt: skip
        assert found.drafts.tolist() == wanted.drafts.tolist()


def test_rows_draw_as_their_requests_do() -> None:
    state, trees, _ = random_trees(50, 20, 1)
    for index, name in enumerate(state.sampling.__slots__):
        values = getattr(state.sampling, name)
        values.copy_(torch.arange(len(values)) + 100 * index)
    found, found_trees = on_device(state), on_device(trees)
    execute([kernel.spread(found, found_trees, 50, 20)])
    reference.spread(state, trees, 50, 20)
    for name in state.sampling.__slots__:
        same = getattr(found_trees.sampling, name).cpu(), getattr(trees.sampling, name)
        assert torch.equal(*same), name

"""Steps and request states of rounds for tests of their kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits, step_shapes
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees

UNTOUCHED = -77


def make_limits(batch: int, draft_len: int, max_seq_len: int = 96) -> StepLimits:
    """Of an engine with pages of 8 tokens."""
    tokens = batch * (draft_len + 2)
    return StepLimits(tokens, tokens, batch, max_seq_len, draft_len, 8, "bfloat16")


def make_step(limits: StepLimits) -> DeviceStep:
    """Arrays that nothing was written to, but for block tables."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, UNTOUCHED, dtype=torch.int32)

    arrays = {name: full(*shape) for name, shape in step_shapes(limits).items()}
    batch, blocks = arrays["block_tables"].shape
    tables = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(1))
    arrays["block_tables"] = tables.to(torch.int32).reshape(batch, blocks)
    return DeviceStep(**arrays)


def clone(owner: Any) -> Any:
    """A dataclass with copies of its tensors."""
    copies = {
        f.name: getattr(owner, f.name).clone()
        for f in fields(owner)
        if isinstance(getattr(owner, f.name), torch.Tensor)
    }
    return replace(owner, **copies)


def assert_same(left: Any, right: Any) -> None:
    """Every tensor of the two is the same."""
    for f in fields(left):
        found = getattr(left, f.name)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, getattr(right, f.name)), f.name


def random_trees(
    max_batch_size: int, draft_len: int, seed: int
) -> tuple[RoundState, DraftTrees, StepLimits]:
    """A state of any trees in sequences of pages of 8 tokens, some of it padding, with few distinct
    tokens, so that drafts are often accepted."""
    seeded = np.random.default_rng(seed)
    limits = make_limits(max_batch_size, draft_len, 512)
    state = RoundState.allocate(max_batch_size, draft_len, "cpu")
    trees = DraftTrees.allocate(max_batch_size, draft_len, "cpu")
    for tensor in (state.root, state.previous, state.drafts, state.targets):
        tensor.copy_(torch.from_numpy(seeded.integers(0, 2, tuple(tensor.shape))))
    reach = int(seeded.integers(1, draft_len + 1))  # small: deep trees
    for request in range(max_batch_size):
        parents = [seeded.integers(max(0, i - reach), i + 1) for i in range(draft_len)]
        trees.parents[request] = torch.tensor(np.array(parents))
        trees.counts[request] = int(seeded.integers(0, draft_len + 1))
        committed = int(seeded.integers(2, 500)) * int(seeded.random() < 0.85)
        state.committed[request] = committed
        state.max_len[request] = committed + int(seeded.integers(1, 2 * draft_len + 2))
        state.capacity[request] = min(512, -(-(committed + int(seeded.integers(0, 70))) // 8) * 8)
    return state, trees, limits

"""Steps and request states of rounds for tests of their kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits, step_shapes

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

"""Rounds of trees that grow, for tests of their kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.tree_growth import kernel
from llmctl.plugins.ops.tree_growth.arrays import GrowthArrays, TreeShape
from support.round_state import UNTOUCHED, assert_same, clone, make_limits, make_step

Described = tuple[GrowthArrays, RoundState, DraftTrees, DeviceStep, StepLimits, int]
SCRATCH = ("keys", "sums", "ranking", "notes")


class Round:
    """A round of some requests, and what it works in."""

    def __init__(
        self, shape: TreeShape, max_batch: int, draft_len: int, batch: int, seed: int, vocab: int
    ) -> None:
        self.shape, self.batch, self.draft_len, self.seed = shape, batch, draft_len, seed
        self.limits: StepLimits = make_limits(max_batch, draft_len)
        self.state = RoundState.allocate(max_batch, draft_len, "cpu")
        self.trees = DraftTrees.allocate(max_batch, draft_len, "cpu")
        self.step: DeviceStep = make_step(self.limits)
        self.arrays = GrowthArrays.allocate(max_batch, draft_len, shape, vocab, "cpu")
        for name in (*SCRATCH, "rows", "frontier", "places", "kinds"):
            getattr(self.arrays, name).fill_(UNTOUCHED)
        self.state.committed[:batch] = 40
        self.state.capacity.fill_(96)
        self.state.max_len.fill_(96)

    def copy(self) -> Round:
        other = object.__new__(Round)
        vars(other).update(vars(self))
        for name in ("state", "trees", "step", "arrays"):
            setattr(other, name, clone(getattr(self, name)))
        sampling = self.state.sampling
        other.state = replace(other.state, sampling=clone(sampling))
        return other

    @property
    def described(self) -> Described:
        return self.arrays, self.state, self.trees, self.step, self.limits, self.batch

    def run(self, module: Any, level: int, logits: torch.Tensor, num_ids: int, token: bool) -> None:
        """A level by kernels or by the reference."""
        rows = self.batch * (self.shape.width if level else 1)
        offered = (logits, self.arrays, rows)
        options = {"is_root": level == 0, "num_ids": num_ids}
        launches = module.offer(*offered, **options)
        grown = module.grow(*self.described, self.draft_len, level, of_pairs=token)
        if module is kernel:
            run_launches([*launches, grown])

    def assert_same(self, other: Round) -> None:
        """But for scratch."""
        for name in ("state", "trees", "step"):
            assert_same(getattr(self, name), getattr(other, name))
        for field in fields(GrowthArrays):
            if field.name not in (*SCRATCH, "shape"):
                mine, theirs = (getattr(own.arrays, field.name) for own in (self, other))
                assert torch.equal(mine, theirs), field.name


def random_round(
    shape: TreeShape, max_batch: int, draft_len: int, batch: int, seed: int, vocab: int
) -> Round:
    """Padding anywhere, requests that are sampled, an id that ends the text, and lengths at every
    border of the cache."""
    made = Round(shape, max_batch, draft_len, batch, seed, vocab)
    seeded = np.random.default_rng(seed)
    for request in range(max_batch):
        committed = int(seeded.integers(2, 91)) * int(seeded.random() < 0.85)
        made.state.committed[request] = committed
        blocks = int(seeded.integers(max(committed, 8) // 8, 13))
        made.state.capacity[request] = min(96, 8 * blocks)
        made.state.max_len[request] = committed + int(seeded.integers(1, 2 * draft_len))
        made.state.sampling.greedy[request] = int(seeded.random() < 0.7)
        made.arrays.ends[request] = int(seeded.choice([-1, 0, 3]))
    return made


def random_logits(seeded: np.random.Generator, shape: tuple[int, int], ties: bool) -> torch.Tensor:
    """Some are no numbers, others -inf."""
    logits = torch.from_numpy(seeded.normal(size=shape) * 3).float()
    logits = logits.round() if ties else logits
    logits[torch.from_numpy(seeded.random(shape) < 0.1)] = -torch.inf
    logits[torch.from_numpy(seeded.random(shape) < 0.02)] = torch.nan
    return logits

"""Requests whose attention has FP8 products up to a token of each prompt, or everywhere. is_last:
the model's last layer, of which tokens that get logits are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed

import numpy as np
import torch

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import KEYS
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from support.attention import Part, World


@dataclass
class Fp8World(World):
    """A cache in E4M3, for an engine built with the option."""

    context_ends: Mapping[int, int] = field(default_factory=dict)  # by request; others: 0
    is_last: bool = False

    @property
    def attributes(self) -> dict[str, int | float | str | bool]:
        return {**super().attributes, **Fp8Tokens.PROMPTS.attributes, **_ends(self.is_last)}

    def step(self, parts: Sequence[Part]) -> StepInputs:
        ends = [self.context_ends.get(request, 0) for request, _, _ in parts]
        return changed(super().step(parts), context_end=np.array(ends, np.int32))


@dataclass
class AllFp8World(World):
    """A cache in E4M3, for an engine in which every token has FP8 products."""

    is_last: bool = False

    @property
    def attributes(self) -> dict[str, int | float | str | bool]:
        return {**super().attributes, **Fp8Tokens.ALL.attributes, **_ends(self.is_last)}

    def limits(self) -> StepLimits:
        return changed(super().limits(), fp8_generation=True)

    def let_logits_rise(self) -> None:
        """By a little more than RAISE at a time: within a chain, with one, within a second one."""
        steps = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3])  # of sixteen tiles
        for queries in self.queries:
            queries.fill_(0.75)
        for table, length in zip(self.tables, self.lengths, strict=True):
            positions = torch.arange(length)
            blocks = table[positions // self.tokens_per_block].long().to(self.device)
            keys = (steps[positions // KEYS % 16] * 0.5 + 0.5).to(self.device, self.cache.dtype)
            inside = (positions % self.tokens_per_block).to(self.device)
            self.cache[:, blocks, 0, :, inside] = keys[:, None, None, None]


def _ends(is_last: bool) -> dict[str, bool]:
    return {"ends_only": True} if is_last else {}

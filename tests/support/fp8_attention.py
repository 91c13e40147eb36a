"""Requests whose prompts' attention has FP8 products up to a token of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed

import numpy as np

from llmctl.plugins.core.calls import StepInputs
from support.attention import Part, World


@dataclass
class Fp8World(World):
    """A cache in E4M3, for an engine built with the option."""

    context_ends: Mapping[int, int] = field(default_factory=dict)  # by request; others: 0

    @property
    def attributes(self) -> dict[str, int | float | str | bool]:
        return {**super().attributes, "fp8_context": True}

    def step(self, parts: Sequence[Part]) -> StepInputs:
        ends = [self.context_ends.get(request, 0) for request, _, _ in parts]
        return changed(super().step(parts), context_end=np.array(ends, np.int32))

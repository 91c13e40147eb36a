"""The draft engine method: which engines it opens and what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.draft_engine.tree import DraftTree
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS, AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
    from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
    from llmctl.runtime.drafting.drafter import Described, DeviceDrafter, Drafter
    from llmctl.runtime.drafting.growth.growth import Plant
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

ROLE = "draft"


@refused.refuses()
@dataclass(frozen=True, slots=True)
class DraftEngine:
    """See DraftMethod for every member. tree: what it drafts; None: chains."""

    name = "draft engine"
    build_mode = EXTERNAL_DRAFTS
    has_lengths = True  # else those that the target was built for, with this draft in mind
    is_drafting = True
    engine: Path
    draft_len: int | None = None
    acceptance: AcceptRule = "tokens"
    notes: tuple[str, ...] = field(default=(), compare=False)
    tree: DraftTree | None = None

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def drafts_trees(self) -> bool:
        """Unless they are chains."""
        return self.tree is not None

    @property
    def is_device_led(self) -> bool:
        """Only with acceptance by tokens: distributions are handled by the host."""
        return self.acceptance == "tokens"

    @property
    def engines(self) -> Mapping[str, Path]:
        """The draft engine."""
        return {ROLE: self.engine}

    def with_draft_len(self, draft_len: int) -> DraftEngine:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.draft_engine.pair_check import check_pair, require_trees

        if self.tree is None:
            return check_pair(target, configs[ROLE], self.draft_len)
        wanted = self.tree.nodes if self.draft_len is None else self.draft_len
        found = check_pair(target, configs[ROLE], wanted, self.tree)
        require_trees(target, configs[ROLE], self.tree)
        return found

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> DraftEngineDrafter:
        from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter

        return DraftEngineDrafter(engines[ROLE], draft_len, self._plant())

    def _plant(self) -> Plant | None:
        from llmctl.runtime.drafting.growth.growth import DynamicShape

        if self.tree is None:
            return None
        return DynamicShape(self.tree.branch, self.tree.width, self.tree.depth)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceDrafter | None:
        from llmctl.plugins.ops.tree_growth.arrays import TreeShape
        from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
        from llmctl.runtime.drafting.draft_engine.device_trees import DeviceDraftTrees

        draft = engines[ROLE]
        if self.tree is None:
            return DeviceDraftEngine(draft, draft_len)
        # More of a level than there are drafts would change nothing.
        offers, width = (min(n, draft_len) for n in (self.tree.branch, self.tree.width))
        shape = TreeShape(offers, width, self.tree.depth)
        if not shape.fits(draft_len, draft.program.limits):
            return None
        return DeviceDraftTrees(draft, shape, draft_len)

    @staticmethod
    def follow(described: Described, engines: Mapping[str, CudaEngine]) -> DeviceDraftEngine:
        from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine

        return DeviceDraftEngine.follow(described, engines)

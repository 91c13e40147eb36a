"""An EAGLE head in the target's own engine as a method: it opens nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.method import AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, MedusaTree
    from llmctl.plugins.ops.tree_growth.arrays import TreeShape
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.drafting.eagle.device import DeviceEagle
    from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
    from llmctl.runtime.drafting.growth.growth import Plant
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

MOST_OFFERS = 10  # EAGLE's


@refused.refuses()
@dataclass(frozen=True, slots=True)
class Eagle:
    """See DraftMethod for every member. choices: of a static tree; num_offers: tokens that may
    follow one draft of a dynamic tree, depth: drafts of its longest path; neither: chains."""

    name = "eagle"
    build_mode = "eagle"
    is_drafting = True
    is_device_led = True
    notes = ()
    draft_len: int | None = None
    choices: MedusaTree | None = None
    num_offers: int | None = None
    depth: int | None = None  # as long as EAGLE's
    acceptance: AcceptRule = "tokens"

    def __post_init__(self) -> None:
        check_values(self, "num_offers", "depth")

    @property
    def drafts_trees(self) -> bool:
        """Unless they are chains."""
        return self.choices is not None or self.num_offers is not None

    @property
    def has_lengths(self) -> bool:
        """A static tree says it, too."""
        return self.draft_len is not None or self.choices is not None

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> Eagle:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.eagle.engine_check import check_engine, require_trees

        wanted = self.draft_len
        if wanted is None and self.choices is not None:
            wanted = self.choices.num_nodes
        most = check_engine(target, wanted)
        if self.choices is not None:
            most = min(most, self.choices.num_nodes)
        if self.drafts_trees:
            require_trees(target, self.choices)
        return most

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> EagleDrafter:
        from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
        from llmctl.runtime.drafting.eagle.head import EngineHead
        from llmctl.runtime.engines.opening import TARGET

        target = engines[TARGET]
        return EagleDrafter(EngineHead(target), draft_len, self._plant(target.config))

    def _plant(self, target: EngineConfig) -> Plant | None:
        from llmctl.runtime.drafting.eagle.engine_check import tree_width
        from llmctl.runtime.drafting.growth.growth import LEVELS, DynamicShape, StaticShape

        if self.choices is not None:
            return StaticShape(self.choices)
        if self.num_offers is None:
            return None
        width = min(self.num_offers, tree_width(target))
        return DynamicShape(self.num_offers, width, self.depth or LEVELS)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceEagle | None:
        from llmctl.runtime.drafting.eagle.device import DeviceEagle
        from llmctl.runtime.drafting.eagle.device_trees import DeviceEagleTrees
        from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
        from llmctl.runtime.engines.opening import TARGET

        assert isinstance(drafter, EagleDrafter), "of `make_drafter`"
        target = engines[TARGET]
        if not self.drafts_trees:
            return DeviceEagle(target, drafter, draft_len)
        shape = self._shape(target.config, draft_len)
        if not shape.fits(draft_len, target.program.limits):
            return None
        return DeviceEagleTrees(target, drafter, shape, draft_len)

    def _shape(self, target: EngineConfig, draft_len: int) -> TreeShape:
        from llmctl.plugins.ops.tree_growth.arrays import GivenTree, TreeShape
        from llmctl.runtime.drafting.eagle.engine_check import tree_width
        from llmctl.runtime.drafting.growth.growth import LEVELS

        if self.choices is not None:
            given = GivenTree.of(self.choices.paths)
            return TreeShape(given.num_offers, given.width, self.choices.depth, given)
        assert self.num_offers is not None, "of a dynamic tree"
        offers = min(self.num_offers, draft_len)  # more would change nothing
        return TreeShape(offers, min(offers, tree_width(target)), self.depth or LEVELS)

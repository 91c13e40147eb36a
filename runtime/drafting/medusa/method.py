"""Heads in the target's own engine as a method: it opens nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.method import AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, MedusaTree
    from llmctl.runtime.drafting.drafter import Described, Drafter
    from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy
    from llmctl.runtime.drafting.medusa.device import DeviceMedusa
    from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

MODE = "medusa"


@refused.refuses()
@dataclass(frozen=True, slots=True)
class Medusa:
    """See DraftMethod for every member. tree: None is the one that the engine was built with.
    accuracy: counts how often each head is right, while requests run."""

    name = "medusa"
    build_mode = MODE
    is_drafting = True
    drafts_trees = True
    notes = ()
    tree: MedusaTree | None = None
    draft_len: int | None = None  # nodes of the tree; None: all
    acceptance: AcceptRule = "tokens"
    accuracy: HeadAccuracy | None = None

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def has_lengths(self) -> bool:
        """A tree says it, too; and heads are counted over all of theirs."""
        return any(own is not None for own in (self.draft_len, self.tree, self.accuracy))

    @property
    def is_device_led(self) -> bool:
        """Unless the host counts what the heads said."""
        return self.accuracy is None

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> Medusa:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.medusa.engine_check import check_engine

        return check_engine(target, self.tree, self.draft_len)

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> MedusaDrafter:
        from llmctl.builder.engine_format import TOP_K
        from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
        from llmctl.runtime.drafting.medusa.engine_check import built_tree, num_heads
        from llmctl.runtime.drafting.medusa.heads import EngineHeads
        from llmctl.runtime.engines.opening import TARGET

        target = engines[TARGET]
        tree = self.tree or built_tree(target.config)
        if self.accuracy is None:
            return MedusaDrafter(EngineHeads(target, tree.depth), tree, draft_len)
        heads = EngineHeads(target, num_heads(target.config))  # all are counted
        return MedusaDrafter(heads, tree, draft_len, self.accuracy, TOP_K)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceMedusa:
        from llmctl.runtime.drafting.medusa.device import DeviceMedusa
        from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
        from llmctl.runtime.drafting.medusa.engine_check import built_tree
        from llmctl.runtime.engines.opening import TARGET

        assert isinstance(drafter, MedusaDrafter), "of `make_drafter`"
        target = engines[TARGET]
        return DeviceMedusa(target, self.tree or built_tree(target.config), draft_len, drafter.rows)

    @staticmethod
    def follow(described: Described, engines: Mapping[str, CudaEngine]) -> DeviceMedusa:
        from llmctl.runtime.drafting.medusa.device import DeviceMedusa

        return DeviceMedusa.follow(described, engines)

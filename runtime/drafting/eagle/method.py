"""An EAGLE head in the target's own engine as a method: it opens nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.drafting.method import AcceptRule

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.drafting.eagle.device import DeviceEagle
    from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class Eagle:
    """See DraftMethod for every member."""

    name = "eagle"
    build_mode = "eagle"
    is_drafting = True
    drafts_trees = False
    is_device_led = True
    notes = ()
    draft_len: int | None = None
    acceptance: AcceptRule = "tokens"

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> Eagle:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.eagle.engine_check import check_engine

        return check_engine(target, self.draft_len)

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> EagleDrafter:
        from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
        from llmctl.runtime.drafting.eagle.head import EngineHead
        from llmctl.runtime.engines.opening import TARGET

        return EagleDrafter(EngineHead(engines[TARGET]), draft_len)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceEagle:
        from llmctl.runtime.drafting.eagle.device import DeviceEagle
        from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
        from llmctl.runtime.engines.opening import TARGET

        assert isinstance(drafter, EagleDrafter), "of `make_drafter`"
        return DeviceEagle(engines[TARGET], drafter, draft_len)

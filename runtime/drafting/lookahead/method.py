"""Lookahead decoding as a method: it opens nothing beside the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.method import AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, LookaheadDecodingConfig
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.drafting.lookahead.device import DeviceLookahead
    from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

MODE = "lookahead_decoding"


@refused.refuses()
@dataclass(frozen=True, slots=True)
class LookaheadDecoding:
    """See DraftMethod for every member. Any engine with room for the drafts will do.
    config: None is what the engine was built with."""

    name = "lookahead"
    build_mode = MODE
    has_lengths = True  # those of its window: one that is cut guesses little
    is_drafting = True
    drafts_trees = True
    is_device_led = True
    notes = ()
    config: LookaheadDecodingConfig | None = None
    draft_len: int | None = None  # of a round; None: as many as the window and its guesses have
    acceptance: AcceptRule = "tokens"

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> LookaheadDecoding:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.lookahead.engine_check import check_engine

        return check_engine(target, self.config, self.draft_len)

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> LookaheadDrafter:
        from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
        from llmctl.runtime.drafting.lookahead.engine_check import built_config
        from llmctl.runtime.engines.opening import TARGET

        config = self.config or built_config(engines[TARGET].config)
        return LookaheadDrafter(config, draft_len)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceLookahead | None:
        from llmctl.plugins.backends.backend import BACKENDS
        from llmctl.runtime.drafting.lookahead.device import DeviceLookahead
        from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
        from llmctl.runtime.drafting.lookahead.engine_check import built_config
        from llmctl.runtime.engines.opening import TARGET

        assert isinstance(drafter, LookaheadDrafter), "of `make_drafter`"
        target = engines[TARGET]
        sizes = target.program.limits.lookahead
        if sizes is None or not built_config(target.config).has_room_for(drafter.config):
            return None
        if BACKENDS[target.config.backend].compiles_plans:  # no tree was ever drafted between plans
            return None
        return DeviceLookahead(target, sizes, draft_len, drafter)

"""A recurrent head in the target's own engine as a method: it opens nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.method import AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import Described, Drafter
    from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter
    from llmctl.runtime.drafting.redrafter.drafter import ReDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

MODE = "redrafter"


@refused.refuses()
@dataclass(frozen=True, slots=True)
class RecurrentDrafting:
    """See DraftMethod for every member. None: what the engine was built with."""

    name = "redrafter"
    build_mode = MODE
    is_drafting = True
    drafts_trees = True
    notes = ()
    num_beams: int | None = None
    length: int | None = None  # drafts of a beam
    draft_len: int | None = None  # of a round; None: as many as the beams have
    acceptance: AcceptRule = "tokens"

    def __post_init__(self) -> None:
        check_values(self, "num_beams", "length")

    @property
    def has_lengths(self) -> bool:
        """The number of beams and their length say it, too."""
        return bool(self.num_beams or self.length or self.draft_len)

    @property
    def is_device_led(self) -> bool:
        """Unless there are other beams than the engine's kernels are for."""
        return self.num_beams is None

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> RecurrentDrafting:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.redrafter.engine_check import check_engine

        return check_engine(target, self.num_beams, self.length, self.draft_len)

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> ReDrafter:
        from llmctl.runtime.drafting.redrafter.drafter import ReDrafter
        from llmctl.runtime.drafting.redrafter.engine_check import beam_shape
        from llmctl.runtime.drafting.redrafter.search import searcher_of
        from llmctl.runtime.engines.opening import TARGET

        target = engines[TARGET]
        shape = beam_shape(target.config, self.num_beams, self.length)
        return ReDrafter(searcher_of(target), shape, draft_len)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceReDrafter:
        from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter
        from llmctl.runtime.drafting.redrafter.drafter import ReDrafter
        from llmctl.runtime.drafting.redrafter.engine_check import beam_shape
        from llmctl.runtime.engines.opening import TARGET

        assert isinstance(drafter, ReDrafter), "of `make_drafter`"
        target = engines[TARGET]
        built = beam_shape(target.config, None, None)
        shape = beam_shape(target.config, None, self.length)
        return DeviceReDrafter(target, built, shape, draft_len, drafter.rows)

    @staticmethod
    def follow(described: Described, engines: Mapping[str, CudaEngine]) -> DeviceReDrafter:
        from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter

        return DeviceReDrafter.follow(described, engines)

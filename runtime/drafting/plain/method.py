"""Plain decoding as a draft method: used where no drafts are requested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.drafting.method import AcceptRule

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import Described, Drafter
    from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
    from llmctl.runtime.drafting.plain.drafter import NoDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class PlainDecoding:
    """See DraftMethod for every member."""

    name = "none"
    build_mode = "none"
    has_lengths = True
    is_drafting = False
    drafts_trees = False
    draft_len: int | None = 0
    acceptance: AcceptRule = "tokens"
    is_device_led = True
    notes = ()

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> PlainDecoding:
        """There is none to change."""
        return self

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        """Every engine decodes."""
        return 0

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> NoDrafter:
        """The drafter of no drafts."""
        from llmctl.runtime.drafting.plain.drafter import NoDrafter

        return NoDrafter()

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> NoDeviceDrafter:
        """The same for rounds."""
        from llmctl.runtime.drafting.plain.device import NoDeviceDrafter

        return NoDeviceDrafter()

    @staticmethod
    def follow(described: Described, engines: Mapping[str, CudaEngine]) -> NoDeviceDrafter:
        """See FollowedMethod."""
        from llmctl.runtime.drafting.plain.device import NoDeviceDrafter

        return NoDeviceDrafter()

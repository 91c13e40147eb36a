"""The n-gram lookup method: it opens no engine and runs on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.runtime.api import refused
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS, AcceptRule, check_values

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import DeviceDrafter, Drafter
    from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine


@refused.refuses()
@dataclass(frozen=True, slots=True)
class NgramLookup:
    """See DraftMethod for every member."""

    name = "n-gram"
    build_mode = EXTERNAL_DRAFTS
    has_lengths = True
    is_drafting = True
    drafts_trees = False
    is_device_led = False
    draft_len: int | None
    max_ngram: int
    acceptance: AcceptRule = "tokens"
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_values(self, "max_ngram")

    @property
    def engines(self) -> Mapping[str, Path]:
        """None."""
        return {}

    def with_draft_len(self, draft_len: int) -> NgramLookup:
        """See DraftMethod, as for all that follow."""
        return replace(self, draft_len=draft_len)

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        from llmctl.runtime.drafting.target_check import check_target

        return check_target(target, self.draft_len, self.build_mode)

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> NgramDrafter:
        from llmctl.runtime.drafting.ngram.drafter import NgramDrafter

        return NgramDrafter(draft_len, self.max_ngram)

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceDrafter:
        raise AssertionError("is_device_led is False")

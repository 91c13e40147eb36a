"""What a method of drafting is: how it is asked for, what it opens, what runs it.

A method is a folder beside this file with a `ROW` in its `options.py`; `methods.py` lists the rows.
Nothing here, and no `options.py`, imports torch: the command line reads them for its help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import DeviceDrafter, Drafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

AcceptRule = Literal["tokens", "logits"]


class DraftMethod(Protocol):
    """One way to draft, with the values it was asked for. Immutable."""

    @property
    def name(self) -> str:
        """As reports say it."""

    @property
    def is_drafting(self) -> bool:
        """False for plain decoding alone."""

    @property
    def draft_len(self) -> int | None:
        """Drafts a round, at most; None: as many as the target engine was built for."""

    @property
    def acceptance(self) -> AcceptRule:
        """The rule for sampled requests (docs/speculation.md)."""

    @property
    def is_device_led(self) -> bool:
        """Whether a device can draft for itself, so that it leads rounds."""

    @property
    def engines(self) -> Mapping[str, Path]:
        """Engine directories to open beside the target, by role."""

    def with_draft_len(self, draft_len: int) -> DraftMethod:
        """The same with another length."""

    def check(self, target: EngineConfig, beside: Mapping[str, EngineConfig]) -> int:
        """The draft length to use. Reads no weights. Raises PairMismatch where the engines do not
        fit together."""

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> Drafter:
        """What the host leads; `engines` by role, the target among them."""

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int
    ) -> DeviceDrafter:
        """What the device leads; only of a method that says so."""


@dataclass(frozen=True, slots=True)
class MethodOption:
    """An option of `run` and `bench` that belongs to one method. Its value is None by default."""

    name: str  # of the value
    flags: tuple[str, ...]
    kind: type
    help: str
    is_hidden: bool = False  # shown by --help-all


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A method in the table. `make(values, draft_len)` gives None where its options are not set,
    and raises BadConfig or Unsupported where they are wrong; `draft_len` is that of --draft-len.
    `how` is what a user types to ask for it."""

    how: str
    options: tuple[MethodOption, ...]
    make: Callable[[Mapping[str, Any], int | None], DraftMethod | None]

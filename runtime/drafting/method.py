"""The interface of a draft method: how it is requested, what it opens, what runs it.

A method is a folder in this package with a `ROW` in its `options.py`; `methods.py` lists the rows.
Neither this file nor any `options.py` imports torch, because the command line reads them for its
help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from llmctl.errors import BadConfig
from llmctl.runtime.api.field_types import check_types

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.drafting.drafter import (
        Described,
        DeviceDrafter,
        Drafter,
        FollowedDrafter,
    )
    from llmctl.runtime.engines.cuda_engine import CudaEngine
    from llmctl.runtime.engines.engine import Engine

AcceptRule = Literal["tokens", "logits"]
EXTERNAL_DRAFTS = "draft_tokens_external"  # the build mode of engines that verify any drafts


def check_values(method: Any, *counts: str) -> None:
    """Refuse values of a method's fields that are of another type than they say, and a draft_len or
    one of these counts below 1. Raises BadConfig."""
    check_types(method)
    for name in ("draft_len", *counts):
        value = getattr(method, name)
        if value is not None and value < 1:
            raise BadConfig(
                f"{name} of {method.name} is {value}; it must be at least 1",
                fix=f"leave {name} out for what the engine was built with",
            )


@runtime_checkable
class DraftMethod(Protocol):
    """One way to draft, with its option values. Immutable."""

    @property
    def name(self) -> str:
        """The name shown in reports."""

    @property
    def build_mode(self) -> str:
        """The --speculative_decoding_mode that its target engine is built with, a row of
        builder/speculative_modes.py; "none": any engine will do."""

    @property
    def is_drafting(self) -> bool:
        """False only for plain decoding."""

    @property
    def draft_len(self) -> int | None:
        """The most drafts per round; None: as many as the target engine was built for."""

    @property
    def has_lengths(self) -> bool:
        """Whether its options say how much is drafted. If not, and the host controls every step,
        lengths are chosen by their measured cost, as for --adaptive-draft-len."""

    @property
    def acceptance(self) -> AcceptRule:
        """The rule for sampled requests (docs/speculation.md)."""

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts may be trees."""

    @property
    def is_device_led(self) -> bool:
        """Whether drafting can run on the device, so that generation uses device rounds."""

    @property
    def engines(self) -> Mapping[str, Path]:
        """Engine directories to open besides the target, by role."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for people on what of its options has no effect."""

    def with_draft_len(self, draft_len: int) -> DraftMethod:
        """The same method with another draft length."""

    def check(self, target: EngineConfig, configs: Mapping[str, EngineConfig]) -> int:
        """The draft length to use. `configs`: of all engines by role, the target included. Reads no
        weights. Raises PairMismatch if the engines do not fit together."""

    def make_drafter(self, engines: Mapping[str, Engine], draft_len: int) -> Drafter:
        """The drafter for steps controlled by the host; `engines` by role, including the target."""

    def make_device_drafter(
        self, engines: Mapping[str, CudaEngine], draft_len: int, drafter: Drafter
    ) -> DeviceDrafter | None:
        """The drafter for device rounds; only called if `is_device_led`. None: this target has no
        kernels for it, so that the host leads. `drafter`: the one that `make_drafter` made, for the
        steps between rounds."""


class FollowedMethod(Protocol):
    """The class of a method with a drafter that other ranks make the same of."""

    name: str

    @staticmethod
    def follow(described: Described, engines: Mapping[str, CudaEngine]) -> FollowedDrafter:
        """That drafter on another rank, of what rank 0's says of itself."""


@dataclass(frozen=True, slots=True)
class MethodOption:
    """An option of `run` and `bench` that belongs to one method. Its value is None by default."""

    name: str  # of the value
    flags: tuple[str, ...]
    kind: type
    help: str
    is_hidden: bool = False  # shown by --help-all


@dataclass(frozen=True, slots=True)
class Compared:
    """A method as `bench --compare-drafting` names it: NAME, or NAME=DIR. values: of the method's
    options. DIR is the target engine, or with `folder` the value of that option, which it needs.
    has_window: whether a request may have a `lookahead_config`."""

    name: str
    values: Mapping[str, Any]
    folder: str | None = None
    has_window: bool = False


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A method in the table. `make(values, draft_len)` returns None if its options are not set, and
    raises BadConfig or Unsupported if they are wrong; `draft_len` is that of --draft-len. `how` is
    what a user types to request it. `followed`: the method's class, if ranks with a GPU each can
    draft alike."""

    how: str
    options: tuple[MethodOption, ...]
    compared: tuple[Compared, ...] = field(default=(), kw_only=True)
    followed: type[FollowedMethod] | None = field(default=None, kw_only=True)
    make: Callable[[Mapping[str, Any], int | None], DraftMethod | None]

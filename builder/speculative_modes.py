"""How an engine takes part in speculative decoding: the values of --speculative_decoding_mode.

A draft method names the mode that its target engines are built with (`DraftMethod.build_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.eagle.check import CHECK as EAGLE_CHECK
from llmctl.builder.heads.eagle.mode import OPTIONS as EAGLE_OPTIONS
from llmctl.builder.heads.eagle.mode import describe as describe_eagle
from llmctl.builder.heads.eagle.mode import invent_eagle, prepare_eagle
from llmctl.builder.heads.eagle.mode import record_heads as record_eagle
from llmctl.builder.heads.eagle.names import MODULE as EAGLE
from llmctl.builder.heads.lookahead.check import CHECK as LOOKAHEAD_CHECK
from llmctl.builder.heads.lookahead.mode import NUMBER as LOOKAHEAD
from llmctl.builder.heads.lookahead.mode import describe as describe_lookahead
from llmctl.builder.heads.lookahead.mode import invent_lookahead, prepare_lookahead
from llmctl.builder.heads.medusa.check import CHECK as MEDUSA_CHECK
from llmctl.builder.heads.medusa.layouts import MODULE as MEDUSA
from llmctl.builder.heads.medusa.mode import describe as describe_medusa
from llmctl.builder.heads.medusa.mode import invent_medusa, prepare_medusa
from llmctl.builder.heads.medusa.mode import record_heads as record_medusa
from llmctl.builder.heads.redrafter.check import CHECK as REDRAFTER_CHECK
from llmctl.builder.heads.redrafter.mode import OPTIONS as REDRAFTER_OPTIONS
from llmctl.builder.heads.redrafter.mode import describe as describe_redrafter
from llmctl.builder.heads.redrafter.mode import invent_redrafter, prepare_redrafter
from llmctl.builder.heads.redrafter.mode import record_heads as record_redrafter
from llmctl.builder.heads.redrafter.names import MODULE as REDRAFTER
from llmctl.builder.validation.head_forms import HeadCheck
from llmctl.errors import Unsupported

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.models.family import ModelConfig
    from llmctl.builder.network import Network
    from llmctl.quantize.checkpoint import Checkpoint

Facts = Mapping[str, Any]
NONE: Facts = MappingProxyType({})


def as_they_are(
    request: BuildRequest, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[BuildRequest, Checkpoint, Facts]:
    """For modes that need nothing of their own."""
    return request, checkpoint, NONE


def nothing_to_invent(request: BuildRequest, model: ModelConfig) -> tuple[BuildRequest, Facts]:
    """For engines of the base graph alone."""
    return request, NONE


def cannot_invent(request: BuildRequest, model: ModelConfig) -> tuple[BuildRequest, Facts]:
    """For modes whose heads have no generator."""
    raise Unsupported(
        f"--speculative-decoding-mode {request.mode}: its heads cannot be generated",
        fix="build from a checkpoint: --load-format auto",
    )


def no_heads(model: ModelConfig, dtype: str, facts: Facts) -> Sequence[Network]:
    """For engines of the base graph alone."""
    return ()


@dataclass(frozen=True, slots=True)
class BuildMode:
    """One mode. `prepare` gives the request with the limits that follow, the checkpoint with the
    heads' tensors, and facts that config.json keeps (`draft_heads`); it reads no weights. `invent`
    decides limits and facts for weights that are generated, from options alone.
    `record_heads` records the graphs beside the base graph of a model that computes in a dtype,
    each with a name of its own (builder/heads/graphs.py). `options` are fields of BuildRequest that
    are this mode's alone, or some modes'; `describe` says the facts to people; `module` is what
    the names of the heads' tensors begin with, in an engine; `check` is asked of engines that are
    opened, None where there are no facts. `drafts_trees`: what its engines verify is a tree."""

    number: int  # as config.json stores it: TensorRT-LLM's
    is_available: bool = False  # in this version
    prepare: Callable[
        [BuildRequest, ModelConfig, Checkpoint], tuple[BuildRequest, Checkpoint, Facts]
    ] = as_they_are
    record_heads: Callable[[ModelConfig, str, Facts], Sequence[Network]] = no_heads
    invent: Callable[[BuildRequest, ModelConfig], tuple[BuildRequest, Facts]] = cannot_invent
    options: tuple[str, ...] = ()
    describe: Callable[[Facts], str] = str
    module: str = ""
    check: HeadCheck | None = None
    drafts_trees: bool = True

    @property
    def has_heads(self) -> bool:
        """Whether its engines have graphs beside the base graph."""
        return self.record_heads is not no_heads


_HEADS = "draft_model_dir"
# What to do with a draft model, which is no head.
DRAFT_MODELS = (
    "quantize and build a draft model as the target; `llmctl run --draft-engine` takes its engine"
)
SPECULATIVE_MODES: dict[str, BuildMode] = {
    "none": BuildMode(1, is_available=True, invent=nothing_to_invent, drafts_trees=False),
    "draft_tokens_external": BuildMode(  # chains, unless a draft engine is asked for trees
        2, is_available=True, invent=nothing_to_invent, drafts_trees=False
    ),
    "medusa": BuildMode(
        *(4, True, prepare_medusa, record_medusa, invent_medusa),
        options=(_HEADS, "num_medusa_heads", "medusa_choices"),
        describe=describe_medusa,
        module=MEDUSA,
        check=MEDUSA_CHECK,
    ),
    "lookahead_decoding": BuildMode(
        *(LOOKAHEAD, True, prepare_lookahead),
        invent=invent_lookahead,
        options=("lookahead_config",),
        describe=describe_lookahead,
        check=LOOKAHEAD_CHECK,
    ),
    "redrafter": BuildMode(
        *(16, True, prepare_redrafter, record_redrafter, invent_redrafter),
        options=(_HEADS, *REDRAFTER_OPTIONS),
        describe=describe_redrafter,
        module=REDRAFTER,
        check=REDRAFTER_CHECK,
    ),
    "eagle": BuildMode(
        *(32, True, prepare_eagle, record_eagle, invent_eagle),
        options=(_HEADS, *EAGLE_OPTIONS),
        describe=describe_eagle,
        module=EAGLE,
        check=EAGLE_CHECK,
    ),
}
SAME_MODES = {"explicit_draft_tokens": "redrafter"}  # TensorRT-LLM's name for a mode -> its row's


def mode_of(number: int) -> BuildMode:
    """The row of a number that config.json stores."""
    return next(mode for mode in SPECULATIVE_MODES.values() if mode.number == number)


def mode_options() -> tuple[str, ...]:
    """Every option that belongs to some mode, once."""
    rows = SPECULATIVE_MODES.values()
    return tuple(dict.fromkeys(option for mode in rows for option in mode.options))


def available_modes() -> str:
    """The modes that this version builds, for people."""
    return ", ".join(name for name, mode in SPECULATIVE_MODES.items() if mode.is_available)

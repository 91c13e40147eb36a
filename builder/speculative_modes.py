"""How an engine takes part in speculative decoding: the values of --speculative_decoding_mode.

A draft method names the mode that its target engines are built with (`DraftMethod.build_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.medusa.mode import prepare_medusa
from llmctl.builder.heads.medusa.mode import record_heads as record_medusa

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


def no_heads(model: ModelConfig, dtype: str, facts: Facts) -> Sequence[Network]:
    """For engines of the base graph alone."""
    return ()


@dataclass(frozen=True, slots=True)
class BuildMode:
    """One mode. `prepare` gives the request with the limits that follow, the checkpoint with the
    heads' tensors, and facts that config.json keeps (`draft_heads`); it reads no weights.
    `record_heads` records the graphs beside the base graph of a model that computes in a dtype,
    each with a name of its own (builder/heads/graphs.py)."""

    number: int  # as config.json stores it: TensorRT-LLM's
    is_available: bool = False  # in this version
    prepare: Callable[
        [BuildRequest, ModelConfig, Checkpoint], tuple[BuildRequest, Checkpoint, Facts]
    ] = as_they_are
    record_heads: Callable[[ModelConfig, str, Facts], Sequence[Network]] = no_heads


SPECULATIVE_MODES: dict[str, BuildMode] = {
    "none": BuildMode(1, is_available=True),
    "draft_tokens_external": BuildMode(2, is_available=True),
    "medusa": BuildMode(4, True, prepare_medusa, record_medusa),
    "lookahead_decoding": BuildMode(8),
    "explicit_draft_tokens": BuildMode(16),
    "eagle": BuildMode(32),
}


def available_modes() -> str:
    """The modes that this version builds, for people."""
    return ", ".join(name for name, mode in SPECULATIVE_MODES.items() if mode.is_available)

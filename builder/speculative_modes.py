"""How an engine takes part in speculative decoding: the values of --speculative_decoding_mode.

A draft method names the mode that its target engines are built with (`DraftMethod.build_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmctl.builder.models.family import ModelConfig
    from llmctl.builder.network import Network


def no_heads(model: ModelConfig, dtype: str) -> Sequence[Network]:
    """For engines of the base graph alone."""
    return ()


@dataclass(frozen=True, slots=True)
class BuildMode:
    """One mode. `record_heads` records the graphs beside the base graph of a model that computes in
    `dtype`, each with a name of its own (builder/heads/graphs.py)."""

    number: int  # as config.json stores it: TensorRT-LLM's
    is_available: bool = False  # in this version
    record_heads: Callable[[ModelConfig, str], Sequence[Network]] = no_heads


SPECULATIVE_MODES: dict[str, BuildMode] = {
    "none": BuildMode(1, is_available=True),
    "draft_tokens_external": BuildMode(2, is_available=True),
    "medusa": BuildMode(4),
    "lookahead_decoding": BuildMode(8),
    "explicit_draft_tokens": BuildMode(16),
    "eagle": BuildMode(32),
}


def available_modes() -> str:
    """The modes that this version builds, for people."""
    return ", ".join(name for name, mode in SPECULATIVE_MODES.items() if mode.is_available)

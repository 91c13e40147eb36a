"""Has an engine an EAGLE head, which drafts how many, and trees? Asked of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.engine_format import EngineConfig, MedusaTree
from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.target_check import is_built_for, require_continued

MODE = "eagle"


def check_engine(target: EngineConfig, draft_len: int | None) -> int:
    """The most drafts of a round: `draft_len`, or as many as the engine was built for. Raises
    PairMismatch where the engine has no such head, or was built for fewer drafts."""
    if not is_built_for(target, MODE):
        raise PairMismatch(
            "the engine has no EAGLE head: it was built without "
            f"--speculative_decoding_mode {MODE}",
            fix=f"rebuild it with: llmctl build --speculative_decoding_mode {MODE} "
            "--draft_model_dir HEAD",
        )
    _facts(target)
    most = int(target.build_config["max_draft_len"])
    if draft_len is not None and draft_len > most:
        raise PairMismatch(
            f"{draft_len} drafts per round are requested; the engine was built for {most}",
            fix=f"--draft-len {most}, or rebuild it with --max_draft_len {draft_len}",
        )
    return most if draft_len is None else draft_len


def require_trees(target: EngineConfig, choices: MedusaTree | None) -> None:
    """Raises Unsupported where the engine's backend has no attention along trees in the making,
    PairMismatch where a level of `choices` needs more rows than the head computes at once."""
    require_continued(target, "trees from an EAGLE head", "--eagle-choices auto drafts a chain")
    if choices is None:
        return
    inner = {path[:-1] for path in choices.paths} - {()}
    depths = [len(path) for path in inner]
    widest = max((depths.count(depth) for depth in depths), default=0)
    if widest > tree_width(target):
        raise PairMismatch(
            f"--eagle-choices expands {widest} drafts of one level; the engine was built for "
            f"{tree_width(target)}",
            fix=f"rebuild it with --max_non_leaves_per_layer {widest}, or give a narrower tree",
        )


def tree_width(target: EngineConfig) -> int:
    """Drafts of a sequence that a step of the head computes. Raises CorruptEngine."""
    return int(_facts(target)["num_beams"])


def _facts(target: EngineConfig) -> Mapping[str, Any]:
    facts: Mapping[str, Any] | None = target.build_config.get("draft_heads")
    if not facts:
        raise CorruptEngine(
            "config.json of the engine says nothing of its EAGLE head", fix="build the engine again"
        )
    return facts

"""Has an engine an EAGLE head, and how many drafts does it verify? Asked of its config.json."""

from __future__ import annotations

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.target_check import is_built_for

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
    if not target.build_config.get("draft_heads"):
        raise CorruptEngine(
            "config.json of the engine says nothing of its EAGLE head", fix="build the engine again"
        )
    most = int(target.build_config["max_draft_len"])
    if draft_len is not None and draft_len > most:
        raise PairMismatch(
            f"{draft_len} drafts a round are asked for; the engine was built for {most}",
            fix=f"--draft-len {most}, or rebuild it with --max_draft_len {draft_len}",
        )
    return most if draft_len is None else draft_len

"""Can an engine verify drafts, and how many? Asked of its config.json, before weights are read."""

from __future__ import annotations

from llmctl.builder.engine_format import SPECULATIVE_MODES, EngineConfig
from llmctl.errors import PairMismatch

DRAFT_MODE = "draft_tokens_external"


def verifies_drafts(config: EngineConfig) -> bool:
    """Whether the engine was built to verify drafts from outside."""
    return bool(config.build_config["speculative_decoding_mode"] == SPECULATIVE_MODES[DRAFT_MODE])


def check_target(target: EngineConfig, draft_len: int | None) -> int:
    """The draft length to use: `draft_len`, or what the engine was built for when None.

    Raises PairMismatch when the engine cannot verify that many drafts.
    """
    most = int(target.build_config["max_draft_len"])
    wanted = draft_len if draft_len is not None else max(most, 1)
    rebuild = (
        "rebuild the target with: llmctl build "
        f"--speculative_decoding_mode {DRAFT_MODE} --max_draft_len {wanted}"
    )
    if not verifies_drafts(target):
        raise PairMismatch(
            f"the target engine was built without --speculative_decoding_mode {DRAFT_MODE}; "
            "it cannot verify drafts",
            fix=rebuild,
        )
    if wanted > most:
        raise PairMismatch(
            f"draft_len is {wanted}; the target engine was built for max_draft_len {most}",
            fix=f"lower the draft length to {most}, or {rebuild}" if most else rebuild,
        )
    return wanted

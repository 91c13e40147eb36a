"""Can an engine verify drafts, and how many? Asked of its config.json, before weights are read."""

from __future__ import annotations

from llmctl.builder.engine_format import SPECULATIVE_MODES, EngineConfig
from llmctl.errors import PairMismatch, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS

USUAL_DRAFT_LEN = 4  # to build for, where nobody says how many


def is_built_for(config: EngineConfig, build_mode: str) -> bool:
    """Whether an engine was built with this --speculative_decoding_mode."""
    number = SPECULATIVE_MODES[build_mode].number
    return bool(config.build_config["speculative_decoding_mode"] == number)


def check_target(
    target: EngineConfig,
    draft_len: int | None,
    build_mode: str = EXTERNAL_DRAFTS,
    less: str = "lower the draft length to",
) -> int:
    """The draft length to use: `draft_len`, or what the engine was built for when None. less: how
    the user would ask for no more than a number.

    Raises PairMismatch when the engine cannot verify that many drafts of a method that needs
    `build_mode`.
    """
    most = int(target.build_config["max_draft_len"])
    wanted = draft_len if draft_len is not None else max(most, 1)
    room = draft_len or most or USUAL_DRAFT_LEN
    rebuild = (
        "rebuild the target with: llmctl build "
        f"--speculative_decoding_mode {build_mode} --max_draft_len {room}"
    )
    if not is_built_for(target, build_mode):
        raise PairMismatch(
            f"the target engine was built without --speculative_decoding_mode {build_mode}; "
            "it cannot verify drafts",
            fix=rebuild,
        )
    if wanted > most:
        raise PairMismatch(
            f"draft_len is {wanted}; the target engine was built for max_draft_len {most}",
            fix=f"{less} {most}, or {rebuild}" if most else rebuild,
            general_fix=rebuild,
        )
    return wanted


def require_continued(target: EngineConfig, what: str, fix: str) -> None:
    """Raises Unsupported where the engine's backend has no attention along trees in the making."""
    if BACKENDS[target.backend].continues_trees:
        return
    names = ", ".join(name for name, row in BACKENDS.items() if row.continues_trees)
    raise Unsupported(
        f"{what} are not available on backend {target.backend!r}; they are on {names}",
        fix=fix,
        general_fix="take a method that drafts chains",
    )

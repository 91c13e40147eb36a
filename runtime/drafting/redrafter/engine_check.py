"""Has an engine a recurrent head, and for how many beams? Asked of its config.json alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.redrafter.method import MODE
from llmctl.runtime.drafting.target_check import is_built_for

if TYPE_CHECKING:
    from llmctl.runtime.drafting.redrafter.drafter import BeamShape


def check_engine(
    target: EngineConfig, num_beams: int | None, length: int | None, draft_len: int | None
) -> int:
    """The most drafts of a round: `draft_len`, or as many as the beams have.

    None is what the engine was built with. Raises PairMismatch where the engine has no such head,
    or was built for fewer or shorter beams.
    """
    if not is_built_for(target, MODE):
        raise PairMismatch(
            "the engine has no ReDrafter head: it was built without "
            f"--speculative_decoding_mode {MODE}",
            fix=f"rebuild it with: llmctl build --speculative_decoding_mode {MODE} "
            "--draft_model_dir HEAD",
        )
    built = beam_shape(target, None, None)
    for flag, wanted, most in (
        ("--redrafter-num-beams", num_beams, built.num_beams),
        ("--redrafter-draft-len-per-beam", length, built.length),
    ):
        if wanted is not None and wanted > most:
            raise PairMismatch(
                f"{flag} is {wanted}; the engine was built for {most}",
                fix=f"{flag} {most} or less, or rebuild it with {flag} {wanted}",
            )
    most = beam_shape(target, num_beams, length).num_drafts
    if draft_len is not None and draft_len > most:
        raise PairMismatch(
            f"{draft_len} drafts per round are requested; the beams have {most}",
            fix=f"--draft-len {most}, or leave it out",
        )
    return most if draft_len is None else draft_len


def beam_shape(target: EngineConfig, num_beams: int | None, length: int | None) -> BeamShape:
    """How beams are searched; that config.json's facts are whole was asked when it was read.
    Raises CorruptEngine."""
    from llmctl.runtime.drafting.redrafter.drafter import BeamShape

    facts = target.build_config.get("draft_heads")
    if not facts:
        raise CorruptEngine(
            "config.json of the engine says nothing of its ReDrafter head",
            fix="build the engine again",
        )
    return BeamShape(
        num_beams or int(facts["num_beams"]),
        length or int(facts["draft_len_per_beam"]),
        bool(facts["greedy_search"]),
    )

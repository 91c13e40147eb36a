"""--speculative_decoding_mode redrafter: the head, its beams, and the limits that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.redrafter.names import (
    DEFAULT_BEAMS,
    DEFAULT_LENGTH,
    MOST_BEAMS,
    MOST_DRAFTS,
    RECURRENCES,
)
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.models.family import ModelConfig
    from llmctl.builder.network import Network
    from llmctl.quantize.checkpoint import Checkpoint

OPTIONS = ("redrafter_num_beams", "redrafter_draft_len_per_beam", "redrafter_greedy_search")


def prepare_redrafter(
    request: BuildRequest, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[BuildRequest, Checkpoint, Mapping[str, Any]]:
    """See BuildMode. Reads headers alone.

    Raises what `open_head` raises, PairMismatch (the head of another target) and BadConfig (no
    head, more beams or drafts than there may be).
    """
    from llmctl.builder.heads.redrafter.checkpoint import open_head, require_fit

    if request.draft_model_dir is None:
        raise BadConfig(
            f"--speculative-decoding-mode {request.mode} needs a ReDrafter head",
            fix="name its folder: --draft-model-dir HEAD",
        )
    head = open_head(Path(request.draft_model_dir))
    require_fit(head, model.hidden_size, model.vocab_size)
    shape = {
        "recurrence": head.recurrence,
        "num_layers": head.num_layers,
        "exit_dim": head.exit_dim,
    }
    beams, length = head.num_beams or DEFAULT_BEAMS, head.draft_len_per_beam or DEFAULT_LENGTH
    limits, facts = _decide(request, model, shape, beams, length)
    return limits, head.beside(checkpoint), facts


def invent_redrafter(
    request: BuildRequest, model: ModelConfig
) -> tuple[BuildRequest, Mapping[str, Any]]:
    """See BuildMode: a head of the shape that Apple's trainer makes. Raises BadConfig."""
    if request.draft_model_dir is not None:
        raise BadConfig(
            "--draft-model-dir names a head to read; --load-format dummy and planted generate one",
            fix="leave it out",
        )
    shape = {"recurrence": "silu", "num_layers": 2, "exit_dim": 2 * model.hidden_size}
    return _decide(request, model, shape, DEFAULT_BEAMS, DEFAULT_LENGTH)


def record_heads(model: ModelConfig, dtype: str, facts: Mapping[str, Any]) -> Sequence[Network]:
    """The two graphs of the head."""
    from llmctl.builder.heads.redrafter.network import Recorder

    sizes = (model.hidden_size, facts["exit_dim"], model.vocab_size)
    return Recorder(facts["recurrence"], facts["num_layers"], *sizes, dtype).record()


def describe(facts: Mapping[str, Any]) -> str:
    """The head as `inspect` shows it."""
    search = ", for greedy requests alone" if facts["greedy_search"] else ""
    layers = "1 layer" if facts["num_layers"] == 1 else f"{facts['num_layers']} layers"
    return (
        f"redrafter, {RECURRENCES[facts['recurrence']]}, {layers} of "
        f"{facts['exit_dim']}, {facts['num_beams']} beams of {facts['draft_len_per_beam']} "
        f"drafts{search}"
    )


def _decide(
    request: BuildRequest,
    model: ModelConfig,
    shape: Mapping[str, Any],
    beams: int,
    length: int,
) -> tuple[BuildRequest, dict[str, Any]]:
    """The limits with the beams in them, and what config.json keeps. beams, length: what is meant
    where the request says nothing."""
    beams = request.redrafter_num_beams or beams
    length = request.redrafter_draft_len_per_beam or length
    _check_beams(beams, length, model.vocab_size, request.max_draft_len)
    facts = {
        **shape,
        "num_beams": beams,
        "draft_len_per_beam": length,
        "greedy_search": bool(request.redrafter_greedy_search),
    }
    return replace(request, max_draft_len=beams * length), facts


def _check_beams(beams: int, length: int, vocab_size: int, max_draft_len: int) -> None:
    most = min(vocab_size, MOST_BEAMS)
    if beams > most:
        raise BadConfig(
            f"--redrafter-num-beams is {beams}; with {vocab_size} tokens it must be at most {most}",
            fix=f"--redrafter-num-beams {most} or fewer",
        )
    if beams * length > MOST_DRAFTS:
        raise BadConfig(
            f"{beams} beams of {length} drafts are {beams * length} drafts per round; at most "
            f"{MOST_DRAFTS} are verified",
            fix=f"--redrafter-draft-len-per-beam {MOST_DRAFTS // beams} or less",
        )
    if max_draft_len not in (0, beams * length):
        raise BadConfig(
            f"{beams} beams of {length} drafts are {beams * length} drafts per round; "
            f"--max-draft-len is {max_draft_len}",
            fix="leave --max-draft-len out, or change --redrafter-num-beams and "
            "--redrafter-draft-len-per-beam",
        )

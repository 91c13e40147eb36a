"""--speculative_decoding_mode lookahead_decoding: the limits that follow from the window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.lookahead.config import FORM, OPTION, LookaheadDecodingConfig
from llmctl.errors import BadConfig
from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.models.family import ModelConfig
    from llmctl.quantize.checkpoint import Checkpoint

NUMBER = 8  # of the mode, as config.json stores it: TensorRT-LLM's


def prepare_lookahead(
    request: BuildRequest, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[BuildRequest, Checkpoint, Mapping[str, Any]]:
    """See BuildMode. Raises BadConfig."""
    limits, facts = invent_lookahead(request, model)
    return limits, checkpoint, facts


def invent_lookahead(
    request: BuildRequest, model: ModelConfig
) -> tuple[BuildRequest, Mapping[str, Any]]:
    """See BuildMode: the checkpoint is not asked. Without sizes, an engine with room for so many
    drafts, as TensorRT-LLM builds it. Raises BadConfig."""
    if request.lookahead_config is None:
        if request.max_draft_len == 0:
            raise BadConfig(
                "--speculative-decoding-mode lookahead_decoding needs the sizes of a window",
                fix=f"{OPTION} {FORM}, or --max-draft-len for any that fit",
            )
        return request, {}
    config = LookaheadDecodingConfig.parse(request.lookahead_config)
    wanted, given = config.max_draft_len, request.max_draft_len
    if wanted == 0:
        raise BadConfig(f"{OPTION} [{config}] drafts nothing", fix=f"{OPTION} {FORM}")
    if given and given < wanted:
        raise BadConfig(
            f"{OPTION} [{config}] is {wanted} drafts per round; --max-draft-len is {given}",
            fix=f"--max-draft-len {wanted}, or leave it out",
        )
    return replace(request, max_draft_len=given or wanted), as_facts(config)


def as_facts(config: LookaheadDecodingConfig) -> dict[str, Any]:
    """What config.json keeps."""
    window, ngram, guesses = config.sizes
    return {"window_size": window, "ngram_size": ngram, "verification_set_size": guesses}


def lookahead_sizes(mode: int, facts: Mapping[str, Any]) -> LookaheadSizes | None:
    """The windows that an engine's device rounds can have, of its mode's number and facts; None: it
    was built without sizes, so that the host leads every step."""
    if mode != NUMBER or not facts:
        return None
    return LookaheadSizes(*LookaheadDecodingConfig(**facts).sizes)


def describe(facts: Mapping[str, Any]) -> str:
    """The window as `inspect` shows it."""
    config = LookaheadDecodingConfig(**facts)
    window, ngram, guesses = config.sizes
    return (
        f"none; lookahead with {window} columns, {guesses} n-grams of {ngram} tokens, "
        f"{config.max_draft_len} drafts"
    )

"""What config.json says of the window of lookahead decoding; the plan has nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.lookahead.config import LookaheadDecodingConfig
from llmctl.builder.plan import Plan
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.head_forms import HeadCheck, Tensors
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig


def find_wrong(found: Mapping[str, Any], build: Mapping[str, Any]) -> str | None:
    """Which of its fields is not what readers rely on, and how; None: none."""
    names = {"window_size", "ngram_size", "verification_set_size"}
    if set(found) != names:
        return f"build_config.draft_heads has {sorted(found)!r:.100}; {sorted(names)} is wanted"
    try:
        config = LookaheadDecodingConfig(**found)
    except BadConfig as error:
        return f"build_config.draft_heads: {error}"
    if not 1 <= config.max_draft_len <= build["max_draft_len"]:
        return (
            f"build_config.draft_heads is [{config}], {config.max_draft_len} drafts per round; "
            f"max_draft_len is {build['max_draft_len']}"
        )
    return None


def check_plan(config: EngineConfig, plan: Plan, tensors: Tensors) -> None:
    """Raise CorruptEngine where the plan has a head."""
    if plan.heads:
        raise wrong(f"config.json has lookahead decoding; the plan has {sorted(plan.heads)}")


CHECK = HeadCheck(find_wrong, check_plan)

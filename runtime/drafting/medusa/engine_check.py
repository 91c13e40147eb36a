"""Has an engine heads, and can they draft this tree? Asked of its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.engine_format import EngineConfig, MedusaTree
from llmctl.errors import CorruptEngine, PairMismatch
from llmctl.runtime.drafting.medusa.method import MODE
from llmctl.runtime.drafting.target_check import is_built_for


def check_engine(target: EngineConfig, tree: MedusaTree | None, draft_len: int | None) -> int:
    """The drafts of a round: `draft_len`, or all nodes of the tree.

    tree: None is the engine's own. Raises PairMismatch where the engine has no heads, fewer than
    the tree is deep, or verifies fewer drafts.
    """
    build = target.build_config
    if not is_built_for(target, MODE):
        raise PairMismatch(
            "the engine has no Medusa heads: it was built without "
            f"--speculative_decoding_mode {MODE}",
            fix=f"rebuild it with: llmctl build --speculative_decoding_mode {MODE} "
            "--draft_model_dir HEADS",
        )
    own = built_tree(target)
    chosen = tree or own
    deepest = num_heads(target)
    if chosen.depth > deepest:
        raise PairMismatch(
            f"--medusa-choices holds a path of {chosen.depth} tokens; the engine has {deepest} "
            "heads, and each drafts one token of a path",
            fix=f"shorten the paths to {deepest} elements, or take the tree of the build: "
            "--medusa-choices auto",
        )
    wanted = chosen.num_nodes if draft_len is None else draft_len
    most = int(build["max_draft_len"])
    if wanted > most:
        raise PairMismatch(
            f"{wanted} drafts per round are requested; "
            f"the engine was built for max_draft_len {most}",
            fix=f"--draft-len {most} drafts the first {most} nodes of the tree; for all of them "
            f"rebuild with --max_draft_len {wanted}",
        )
    return min(wanted, chosen.num_nodes)


def built_tree(target: EngineConfig) -> MedusaTree:
    """The tree that the engine was built with. Raises CorruptEngine."""
    return MedusaTree(tuple(map(tuple, _facts(target)["choices"])))


def num_heads(target: EngineConfig) -> int:
    """How many heads the engine has. Raises CorruptEngine."""
    return int(_facts(target)["num_heads"])


def _facts(target: EngineConfig) -> Mapping[str, Any]:
    """What the build wrote of the heads; that it is whole was asked when config.json was read."""
    facts: Mapping[str, Any] | None = target.build_config.get("draft_heads")
    if not facts:
        raise CorruptEngine(
            "config.json of the engine says nothing of its Medusa heads",
            fix="build the engine again",
        )
    return facts

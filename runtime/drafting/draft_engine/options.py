"""The options of a draft engine: --draft-engine, --draft-tree, and run.py's
--draft-target-model-config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import OPTION as TREE
from llmctl.runtime.drafting.draft_engine.tree import DraftTree, parse_tree
from llmctl.runtime.drafting.list_options import (
    parse_list,
    positive,
    require_equal_length,
    take_device,
)
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow

COMPARED_TREE = DraftTree(5, 3, 16)  # of --compare-drafting
_CONFIG = "--draft-target-model-config"
_FORM = "[draft_len, [draft devices], [target devices], use_logits]"


def _make(values: Mapping[str, Any], draft_len: int | None) -> DraftEngine | None:
    engine, config = values["draft_engine"], values["draft_target_model_config"]
    asked = values["draft_tree"]
    if engine is None:
        for option, value in ((_CONFIG, config), (TREE, asked)):
            if value is not None:
                raise BadConfig(f"{option} is given without a draft", fix="add --draft-engine DIR")
        return None
    tree = None if asked is None else parse_tree(asked)
    if tree is not None:
        require_equal_length(f"{TREE} {tree}", tree.nodes, draft_len)
    if config is None:
        return DraftEngine(engine, draft_len, tree=tree)
    found = parse_list(_CONFIG, config, 4, _FORM)
    use_logits = found[3]
    if not isinstance(use_logits, bool):
        raise BadConfig(f"use_logits in {_CONFIG} is {use_logits!r}; it must be True or False")
    notes = [
        note
        for role, devices in (("draft engine", found[1]), ("target engine", found[2]))
        for note in take_device(_CONFIG, devices, role)
    ]
    count = positive(_CONFIG, "draft_len", found[0])
    require_equal_length(_CONFIG, count, draft_len)
    if tree is not None:
        require_equal_length(f"{TREE} {tree}", tree.nodes, count, _CONFIG)
        if use_logits:
            raise BadConfig(
                f"{_CONFIG} has use_logits True; the drafts of a tree are accepted by tokens",
                fix=f"leave {TREE} out, or give False",
            )
    return DraftEngine(engine, count, "logits" if use_logits else "tokens", tuple(notes), tree)


ROW = MethodRow(
    how="--draft-engine DIR",
    options=(
        MethodOption(
            "draft_engine",
            ("--draft-engine", "--draft-engine-dir"),
            Path,
            "Engine of the draft model.",
        ),
        MethodOption(
            "draft_target_model_config",
            (_CONFIG,),
            str,
            '"[draft_len,[draft devices],[target devices],use_logits]", "[4,[0],[0],False]".',
            is_hidden=True,
        ),
        MethodOption(
            "draft_tree",
            (TREE,),
            str,
            '"depth,branch,nodes[,followed]": the draft engine drafts a tree, such as 5,3,16.',
            is_hidden=True,  # --help is full
        ),
    ),
    compared=(
        Compared("draft", {}, folder="draft_engine"),
        Compared("draft-tree", {"draft_tree": str(COMPARED_TREE)}, folder="draft_engine"),
    ),
    followed=DraftEngine,
    make=_make,
)

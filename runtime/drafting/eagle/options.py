"""The options of an EAGLE head, under run.py's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.engine_format import parse_choices
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.eagle.method import MOST_OFFERS, Eagle
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow

OPTION = "--eagle-choices"
DYNAMIC, OFFERS = "--eagle-use-dynamic-tree", "--eagle-dynamic-tree-max-top-k"
DEPTH, MOST_LEVELS = "--eagle-dynamic-tree-depth", 64
CHAIN = "auto"


def _make(values: Mapping[str, Any], draft_len: int | None) -> Eagle | None:
    choices, offers = values["eagle_choices"], values["eagle_dynamic_tree_max_top_k"]
    depth = values["eagle_dynamic_tree_depth"]
    if not values["eagle_use_dynamic_tree"]:
        for option, value in ((OFFERS, offers), (DEPTH, depth)):
            if value is not None:
                raise BadConfig(f"{option} is for {DYNAMIC}", fix=f"add {DYNAMIC}")
        if choices is None:
            return None
        tree = None if choices == CHAIN else parse_choices(choices, OPTION)
        return Eagle(draft_len, tree)
    if choices is not None:
        raise BadConfig(f"{OPTION} and {DYNAMIC} are both given; a tree is of one kind")
    for option, value, most in ((OFFERS, offers, MOST_OFFERS), (DEPTH, depth, MOST_LEVELS)):
        if value is not None and not 1 <= value <= most:
            raise BadConfig(f"{option} is {value}; it must be from 1 to {most}")
    return Eagle(draft_len, num_offers=offers or MOST_OFFERS, depth=depth)


ROW = MethodRow(
    how=f"{OPTION} {CHAIN}",
    options=(
        MethodOption(
            "eagle_choices",
            (OPTION,),
            str,
            'Drafts from the engine\'s EAGLE head: auto, a chain, or a tree, "[[0],[0,0],[1]]".',
            is_hidden=True,  # --help is full
        ),
        MethodOption(
            "eagle_use_dynamic_tree",
            (DYNAMIC,),
            bool,
            "A dynamic tree from the EAGLE head: its --draft-len likeliest tokens.",
            is_hidden=True,
        ),
        MethodOption(
            "eagle_dynamic_tree_max_top_k",
            (OFFERS,),
            int,
            f"Tokens that may follow one draft of a dynamic tree. (default: {MOST_OFFERS})",
            is_hidden=True,
        ),
        MethodOption(
            "eagle_dynamic_tree_depth",
            (DEPTH,),
            int,
            "Drafts of a dynamic tree's longest path: steps of the head. (default: 8)",
            is_hidden=True,
        ),
    ),
    compared=(
        Compared("eagle", {"eagle_choices": CHAIN}),
        Compared("eagle-tree", {"eagle_use_dynamic_tree": True}),
    ),
    make=_make,
)

"""The option of an EAGLE head: run.py's --eagle-choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.errors import Unsupported
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.method import MethodOption, MethodRow

OPTION = "--eagle-choices"
CHAIN = "auto"


def _make(values: Mapping[str, Any], draft_len: int | None) -> Eagle | None:
    choices = values["eagle_choices"]
    if choices is None:
        return None
    if choices != CHAIN:
        raise Unsupported(
            f"{OPTION} is {choices!r}: trees from an EAGLE head are not in this version",
            fix=f"{OPTION} {CHAIN} drafts a chain",
        )
    return Eagle(draft_len)


ROW = MethodRow(
    how=f"{OPTION} {CHAIN}",
    options=(
        MethodOption(
            "eagle_choices",
            (OPTION,),
            str,
            "Drafts from the engine's EAGLE head: auto, a chain.",
            is_hidden=True,  # --help is full
        ),
    ),
    make=_make,
)

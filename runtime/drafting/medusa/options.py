"""The option of Medusa heads: run.py's --medusa-choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.engine_format import parse_choices
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow

OPTION = "--medusa-choices"
BUILT = "auto"


def _make(values: Mapping[str, Any], draft_len: int | None) -> Medusa | None:
    choices = values["medusa_choices"]
    if choices is None:
        return None
    return Medusa(None if choices == BUILT else parse_choices(choices), draft_len)


ROW = MethodRow(
    how=f"{OPTION} {BUILT}",
    options=(
        MethodOption(
            "medusa_choices",
            (OPTION,),
            str,
            'A tree from the engine\'s Medusa heads: auto, or "[[0],[1]]".',
        ),
    ),
    compared=(Compared("medusa", {"medusa_choices": BUILT}),),
    followed=Medusa,
    make=_make,
)

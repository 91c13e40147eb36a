"""The options of a ReDrafter head, under the names that TensorRT-LLM's converter has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting

BEAMS, LENGTH = "--redrafter-num-beams", "--redrafter-draft-len-per-beam"
BUILT = "auto"


def _make(values: Mapping[str, Any], draft_len: int | None) -> RecurrentDrafting | None:
    beams, length = values["redrafter_num_beams"], values["redrafter_draft_len_per_beam"]
    if beams is None and length is None:
        return None
    return RecurrentDrafting(_read(BEAMS, beams), _read(LENGTH, length), draft_len)


def _read(option: str, text: str | None) -> int | None:
    """A number of at least 1; None for what the engine was built with. Raises BadConfig."""
    if text is None or text == BUILT:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise BadConfig(f"{option} is {text!r}; it must be a number of at least 1, or {BUILT}")
    return int(text)


ROW = MethodRow(
    how=f"{BEAMS} {BUILT}",
    options=(
        MethodOption(
            "redrafter_num_beams",
            (BEAMS,),
            str,
            "Beams from the engine's ReDrafter head: auto, or fewer.",
        ),
        MethodOption(
            "redrafter_draft_len_per_beam",
            (LENGTH,),
            str,
            "Drafts of a beam: auto, or fewer than the engine was built for.",
            is_hidden=True,
        ),
    ),
    compared=(Compared("redrafter", {"redrafter_num_beams": BUILT}),),
    followed=RecurrentDrafting,
    make=_make,
)

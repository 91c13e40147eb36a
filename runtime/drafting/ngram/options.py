"""The option of n-gram lookup: run.py's --ngram-config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.runtime.drafting.list_options import (
    parse_list,
    positive,
    require_equal_length,
    take_device,
)
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow
from llmctl.runtime.drafting.ngram.method import NgramLookup

_CONFIG = "--ngram-config"
_FORM = "[draft_len, max_ngram, [devices]]"


def _make(values: Mapping[str, Any], draft_len: int | None) -> NgramLookup | None:
    config = values["ngram_config"]
    if config is None:
        return None
    found = parse_list(_CONFIG, config, 3, _FORM)
    notes = take_device(_CONFIG, found[2], "engine")
    count = positive(_CONFIG, "draft_len", found[0])
    max_ngram = positive(_CONFIG, "max_ngram", found[1])
    require_equal_length(_CONFIG, count, draft_len)
    return NgramLookup(count, max_ngram, notes=tuple(notes))


ROW = MethodRow(
    how=_CONFIG,
    options=(
        MethodOption(
            "ngram_config",
            (_CONFIG, "--prompt-lookup-config"),
            str,
            'N-gram lookup: "[draft_len,max_ngram,[devices]]", "[10,2,[0]]".',
        ),
    ),
    compared=(Compared("ngram", {"ngram_config": "[4,2,[0]]"}),),
    make=_make,
)

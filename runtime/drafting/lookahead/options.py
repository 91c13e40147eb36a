"""The option of lookahead decoding: run.py's --lookahead-config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.drafting.method import Compared, MethodOption, MethodRow

OPTION = "--lookahead-config"
BUILT = "auto"


def _make(values: Mapping[str, Any], draft_len: int | None) -> LookaheadDecoding | None:
    text = values["lookahead_config"]
    if text is None:
        return None
    if text == BUILT:
        return LookaheadDecoding(None, draft_len)
    config = LookaheadDecodingConfig.parse(text)
    if config.max_draft_len == 0:
        raise BadConfig(f"{OPTION} [{config}] drafts nothing", fix=f"leave {OPTION} out")
    return LookaheadDecoding(config, draft_len)


ROW = MethodRow(
    how=f'{OPTION} "[7,5,7]"',
    options=(
        MethodOption(
            "lookahead_config",
            (OPTION,),
            str,
            'Lookahead decoding: "[window,ngram,verification]", "[7,5,7]".',
        ),
    ),
    compared=(Compared("lookahead", {"lookahead_config": BUILT}, has_window=True),),
    make=_make,
)

"""Opens engines of GPU tests of FP8 products by what drafts for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines


@contextmanager
def opened(
    folders: Mapping[str, Path], target: str, draft: str | None, drafts: int, **options: Any
) -> Iterator[Executor]:
    """draft: which engine of `folders` drafts, or "ngram"."""
    method: DraftMethod = PlainDecoding()
    if draft == "ngram":
        method = NgramLookup(drafts, 3)
    elif draft is not None:
        method = DraftEngine(folders[draft], drafts)
    found = EngineOptions(folders[target], method, **{"max_tokens": 16384, **options})
    with OpenEngines(check_engines(found)).executor() as executor:
        yield executor

"""llmctl: FP8 engines from Hugging Face checkpoints, and exact speculative decoding on them.

with llmctl.open("out/target", draft="out/draft") as executor:
    for token in executor.generate(prompt_token_ids, max_tokens=64):
        ...

Importing this is cheap: what runs engines is imported by the first call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmctl.runtime.api.executor import Executor
    from llmctl.runtime.drafting.method import DraftMethod

__all__ = ["open"]


def open(
    engine: Path | str, draft: DraftMethod | Path | str | None = None, **options: Any
) -> Executor:
    """A running executor of an engine directory, with a draft engine's directory or without.

    With `draft_tree="depth,branch,nodes"` the draft engine drafts trees. Other `options` are the
    fields of `llmctl.runtime.open.EngineOptions`, such as free_fraction or max_batch_size. Leaving
    the `with` block cancels what is left and ends its threads, and the processes of other ranks.
    """
    from llmctl.runtime.open import open_executor

    return open_executor(engine, draft, **options)

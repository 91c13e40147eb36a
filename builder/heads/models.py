"""Whole models in the place of heads: a draft model is an engine of its own."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from llmctl.builder.speculative_modes import DRAFT_MODELS
from llmctl.errors import BadConfig
from llmctl.quantize.checkpoint import read_header
from llmctl.quantize.format import INDEX_FILE, SINGLE_FILE, has_file, read_json

_OF_MODELS = {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}


def refuse_model(folder: Path) -> None:
    """Raise BadConfig where --draft-model-dir names a whole model, by the names of its tensors."""
    if set(_names(folder)) >= _OF_MODELS:
        raise BadConfig(
            f"--draft-model-dir {folder} holds a whole model; heads are wanted (Medusa, ReDrafter "
            "or EAGLE)",
            fix=DRAFT_MODELS,
        )


def _names(folder: Path) -> Collection[str]:
    if has_file(folder / SINGLE_FILE):
        return read_header(folder / SINGLE_FILE)
    if has_file(folder / INDEX_FILE):
        found = read_json(folder / INDEX_FILE).get("weight_map")
        return found if isinstance(found, dict) else ()
    return ()

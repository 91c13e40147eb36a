"""The supported model families. To add one: a file with its `Family`, its name in the table, and a
row in `ARCHITECTURES` (quantize/config_fields.py), which says what `quantize` and `build` take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmctl.builder.models.family import Family, ModelConfig, read_model_config
from llmctl.builder.models.llama import LLAMA
from llmctl.builder.models.mistral import MISTRAL
from llmctl.builder.models.qwen2 import QWEN2
from llmctl.builder.models.qwen3 import QWEN3
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.format import find_architecture, is_tied

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family that config.json names, by `architectures` or, where absent, `model_type`.

    Raises UnknownArchitecture, listing the known ones, and CorruptFile for names that are none.
    """
    return FAMILIES[find_architecture(config, where)]


def model_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The normalised model of a config.json. Raises what both of its steps do."""
    return read_model_config(find_family(config, where), config, where)


def stored_model(checkpoint: Checkpoint, where: str) -> ModelConfig:
    """The model of a checkpoint whose config.json is `where`: `model_config`, with an output
    projection of its own where the file holds another than the embedding."""
    model = model_config(checkpoint.config, where)
    return replace(model, tie_word_embeddings=is_tied(checkpoint, model.tie_word_embeddings))

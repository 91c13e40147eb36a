"""The supported model families. To add one: a file with its `Family`, and its name in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.models.family import Family, ModelConfig, read_model_config
from llmctl.builder.models.llama import LLAMA
from llmctl.builder.models.mistral import MISTRAL
from llmctl.builder.models.qwen2 import QWEN2
from llmctl.builder.models.qwen3 import QWEN3
from llmctl.errors import UnknownArchitecture
from llmctl.quantize.format import named_architectures, shown

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family that config.json names, by `architectures` or, where absent, `model_type`.

    Raises UnknownArchitecture, listing the known ones, and CorruptFile for names that are none.
    """
    known = [family.architecture for family in FAMILIES]
    architectures = named_architectures(config, known, where)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if architectures == [family.architecture]:
            return family
        if not architectures and model_type == family.model_type:
            return family
    raise UnknownArchitecture(
        f"{where} names architecture {shown(architectures or model_type)}; "
        f"known: {', '.join(known)}",
        fix="use a checkpoint of one of these families",
    )


def model_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The normalised model of a config.json. Raises what both of its steps do."""
    return read_model_config(find_family(config, where), config, where)

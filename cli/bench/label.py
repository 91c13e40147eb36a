"""`bench --model NAME`: a label, compared with what the engine says of its origin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from llmctl.builder.engine_format import EngineConfig


def label_warning(label: str | None, config: EngineConfig) -> str | None:
    """A line for people where the label names another model than the engine was built from.

    A label is a path or a name on the hub. It fits where its last part, whatever the case, is the
    name of the folder that `build` read, or of the one that `quantize` made that from.
    """
    if label is None or PurePath(label).name.lower() in _names(config):
        return None
    source = config.source
    origin = f"built from {source.get('checkpoint', 'an unknown checkpoint')}"
    if source.get("quantized_from"):
        origin += f", quantized from {source['quantized_from']}"
    return f"warning: --model {label} is a label; the engine measured was {origin}"


def _names(config: EngineConfig) -> Iterator[str]:
    for key in ("checkpoint", "quantized_from"):
        path = config.source.get(key)
        if isinstance(path, str):
            yield PurePath(path).name.lower()

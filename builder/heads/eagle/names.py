"""What an EAGLE head is called in an engine, and its sizes. Imports nothing: the runtime, too,
reads this (through engine_format.py)."""

from __future__ import annotations

EXTEND, NEXT = "eagle.extend", "eagle.next"  # its graphs (network.py)
CACHE = "eagle"  # the KV cache of its layer
FEATURES = "features"  # what the first reads of the target, side by side
STATE = "hidden"  # what a step hands to the next one
DEFAULT_LENGTH = 5  # drafts of a chain
MOST_DRAFTS = 256  # TensorRT-LLM's


def tap_name(layer: int) -> str:
    """The output of the base graph that is what a layer reads, before its norm."""
    return f"layers.{layer}"

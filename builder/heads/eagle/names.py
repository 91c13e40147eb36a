"""What an EAGLE head is called in an engine, and its sizes. Imports nothing of llmctl: the runtime,
too, reads this (through engine_format.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXTEND, NEXT = "eagle.extend", "eagle.next"  # its graphs (network.py)
MODULE = "eagle"  # that the head is in, in an engine
CACHE = "eagle"  # the KV cache of its layer
FEATURES = "features"  # what the first reads of the target; see `feature_inputs`
STATE = "hidden"  # what a step hands to the next one
DEFAULT_LENGTH = 5  # drafts of a chain
ONE_LAYER = [0]  # its window: of engines that say nothing of layers, built before that was asked
MOST_LAYERS = 64
MOST_DRAFTS = 256  # TensorRT-LLM's


def feature_inputs(taps: Sequence[int], *, are_apart: bool) -> Mapping[str, tuple[str, ...]]:
    """The inputs of the first graph, and the outputs of the base graph that each has side by side:
    one input, or one for each tap."""
    names = tuple(map(tap_name, taps))
    if not are_apart:
        return {FEATURES: names}
    return {f"{FEATURES}.{index}": (name,) for index, name in enumerate(names)}


def tap_name(layer: int) -> str:
    """The output of the base graph that is what a layer reads, before its norm."""
    return f"layers.{layer}"

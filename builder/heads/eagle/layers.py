"""How many layers an EAGLE head has, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llmctl.builder.heads.eagle.names import MOST_LAYERS
from llmctl.builder.heads.eagle.shapes import FIRST
from llmctl.errors import MissingTensor, UnexpectedTensor, Unsupported

MIDLAYER = "midlayer."  # EAGLE's name of the first, where there is no other
_LAYER = re.compile(r"layers\.\d{1,4}\.")


def layer_numbers(where: Path, found: Iterable[str]) -> set[int]:
    """Those that the names of a file's tensors have. Raises MissingTensor where it is no head."""
    numbers = {int(name.split(".")[1]) for name in found if _LAYER.match(name)}
    if 0 not in numbers:
        raise MissingTensor(
            f"{where} holds no {MIDLAYER}* and no {FIRST}.* tensors: it is no EAGLE head",
            fix="give the folder of an EAGLE-3 head of this model: --draft-model-dir HEAD",
        )
    return numbers


def count_layers(where: Path, numbers: set[int], stated: int | None) -> int:
    """How many layers there are. stated: what config.json says, where that is known to hold.

    Raises MissingTensor, UnexpectedTensor and Unsupported."""
    count = len(numbers) if stated is None else stated
    if numbers != set(range(count)):
        fail = MissingTensor if set(range(count)) - numbers else UnexpectedTensor
        raise fail(
            f"{where} holds the layers {', '.join(map(str, sorted(numbers)))}; config.json implies "
            f"0 to {count - 1}",
            fix="check that config.json belongs to these weights",
        )
    if count > MOST_LAYERS:
        raise Unsupported(
            f"{where} holds {count} layers; heads of up to {MOST_LAYERS} are read",
            fix="use a smaller head",
        )
    return count

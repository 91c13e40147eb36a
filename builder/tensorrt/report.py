"""The builder's report on an engine: kernels, their operands, memory.

With detailed profiling verbosity the builder reports the engine's layers. Without a GPU that can
load the plan, that is the only way to inspect it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>.*?), (?P<rest>Inputs: .*)$")
_SECTION = re.compile(r"(Inputs|Constants|Outputs): \[(.*?)\](?=, (?:Constants|Outputs|Tactic))")
_TENSOR = re.compile(
    r"Name: (?P<name>.*?), Dimensions: \[(?P<dims>[^\]]*)\].*?Datatype: (?P<type>\w+)"
)
_ENGINE_INDEX = re.compile(r"(?: \[profile \d+\])?_myl(\d+)_\d+$")
_MADE_UP = re.compile(r"^__my|_myl\d+$")  # names of the builder's own
_PROFILE = re.compile(r" ?\[profile \d+\]")
_MEMORY = re.compile(r"^(Total Activation Memory|Max Scratch Memory): (\d+) bytes")
_TYPES = {
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "FP8": "fp8",
    "Int32": "int32",
    "Int64": "int64",
    "Bool": "bool",
}
HOST_KINDS = frozenset({"shape_call"})  # run no kernel


def describe_engine(
    lines: Iterable[tuple[str, str]], profile_names: Sequence[str]
) -> list[dict[str, Any]]:
    """One object a profile: name, layers (kind, name, inputs, outputs), activation and scratch
    bytes. JSON values."""
    found: list[dict[str, Any]] = [
        {"name": name, "layers": [], "activation_bytes": 0, "scratch_bytes": 0}
        for name in profile_names
    ]
    activations: list[int] = []
    scratch: list[int] = []
    for _, message in lines:
        if "LayerType: " in message:
            for line in message.splitlines():
                match = _LAYER.match(line)
                if match:
                    index, layer = _layer(match)
                    found[index]["layers"].append(layer)
        elif match := _MEMORY.match(message):
            (activations if match[1].startswith("Total") else scratch).append(int(match[2]))
    for profile, num_bytes in zip(found, activations, strict=False):
        profile["activation_bytes"] = num_bytes
    for profile, num_bytes in zip(found, scratch, strict=False):
        profile["scratch_bytes"] = num_bytes
    return found


def kernels(profile: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The layers of one profile that run something on the GPU."""
    return [layer for layer in profile["layers"] if layer["kind"] not in HOST_KINDS]


def _layer(match: re.Match[str]) -> tuple[int, dict[str, Any]]:
    """(index of its profile, the layer as JSON values)."""
    name = match["name"]
    index = _ENGINE_INDEX.search(name)
    sections = {kind: _tensors(text) for kind, text in _SECTION.findall(match["rest"])}
    layer = {
        "kind": match["kind"],
        "name": _PROFILE.sub("", _ENGINE_INDEX.sub("", name)),
        "inputs": sections.get("Inputs", []),
        "outputs": sections.get("Outputs", []),
    }
    return (int(index[1]) if index else 0), layer


def _tensors(text: str) -> list[str]:
    """ "name:fp8[-1,4096]" of each; a tensor that the builder made up has no name."""
    found = []
    for match in _TENSOR.finditer(text):
        name = _PROFILE.sub("", match["name"])
        shown = "" if _MADE_UP.search(name) else name
        found.append(f"{shown}:{_TYPES.get(match['type'], match['type'])}[{match['dims']}]")
    return found

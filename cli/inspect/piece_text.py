"""What `llmctl inspect` prints about a plan of TensorRT, for people: its kernels, as built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmctl.cli.table import size, table

_HOST_KINDS = ("shape_call",)  # run nothing on the GPU


def piece_text(piece: Mapping[str, Any]) -> Iterator[str]:
    """Its size and origin, then the kernels of each profile; profiles that are alike once."""
    yield (
        f"plan {piece['name']}: {size(piece['num_bytes'])}, {piece['package']} {piece['version']}, "
        f"{len(piece['bindings'])} bindings"
    )
    shown: dict[str, str] = {}
    for profile in piece["profiles"]:
        rows = [
            (layer["kind"], layer["name"], f"{' '.join(layer['inputs'])} -> {_of(layer)}")
            for layer in profile["layers"]
            if layer["kind"] not in _HOST_KINDS
        ]
        sizes = ", ".join(f"{dim} {_range(values)}" for dim, values in profile["sizes"].items())
        line = (
            f"  profile {profile['name']}: {sizes}, {size(profile['activation_bytes'])} of memory"
        )
        same = shown.setdefault(repr([row[:2] for row in rows]), profile["name"])
        if same != profile["name"]:
            yield f"{line}, the {len(rows)} kernels of {same}"
            continue
        yield f"{line}, {len(rows)} kernels"
        yield from (f"  {row}" for row in table(rows) if rows)


def _of(layer: Mapping[str, Any]) -> str:
    return " ".join(layer["outputs"])


def _range(values: list[int]) -> str:
    least, tuned, most = values
    return str(most) if least == most else f"{least}-{most} ({tuned})"

"""Two folders of engines: whether a change of llmctl changed what it builds.

    scripts/bench/build_engines OLD     # by the tree before
    scripts/bench/build_engines NEW     # by the tree after
    python -m scripts.compare.engines OLD NEW

Compares, of every engine that either folder holds: config.json, the plan, and every tensor of the
engine files (weights, kernels' machine code, TensorRT's plans) by SHA-256. Prints a line for each
difference and exits with 1 where there is one. Where an engine was built, by what versions and with
which command line is left out, and so is the engine file's own record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmctl.builder.container import read_container_header
from llmctl.builder.engine_format import CONFIG_FILE

PROVENANCE = ("command", "files", "source", "versions")  # of config.json
_SHOWN = 60  # characters of a value


def differences(old: Path, new: Path) -> list[str]:
    """A line for each difference between the engines of two folders, each named after its own
    folder. Raises CorruptEngine for a file that is not whole."""
    names = sorted(set(_engines(old)) | set(_engines(new)))
    return [f"{name}: {line}" for name in names for line in _compare(old / name, new / name)]


def _engines(folder: Path) -> list[str]:
    """The names of a folder's engines, "." for the folder itself if it is one."""
    return [str(path.parent.relative_to(folder)) for path in folder.rglob(CONFIG_FILE)]


def _compare(old: Path, new: Path) -> Iterator[str]:
    for folder, other in ((old, new), (new, old)):
        if not (folder / CONFIG_FILE).is_file():
            yield f"only in {other.parent}"
            return
    yield from _unequal("config", _config(old), _config(new))
    files = [{path.name: path for path in folder.glob("*.engine")} for folder in (old, new)]
    for name in sorted(set(files[0]) | set(files[1])):
        if name not in files[0] or name not in files[1]:
            yield f"{name} is only in {'the old' if name in files[0] else 'the new'} engine"
            continue
        plans, tensors = zip(*(_contents(found[name]) for found in files), strict=True)
        yield from _unequal("plan", *plans)
        yield from _unequal("tensor", *tensors)


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_bytes())
    return {name: value for name, value in found.items() if name not in PROVENANCE}


def _contents(path: Path) -> tuple[Any, dict[str, str]]:
    """(the plan, dtype, shape and SHA-256 of each tensor) of an engine file."""
    raw, header = read_container_header(path)
    plan = json.loads(header.pop("__metadata__")["plan"])
    tensors = {}
    with path.open("rb") as file:
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = (
                f"{entry['dtype']} {entry['shape']} {_digest(file, len(raw), begin, end)}"
            )
    return plan, tensors


def _digest(file: Any, start: int, begin: int, end: int) -> str:
    """SHA-256 of the bytes from `begin` to `end` of the data, which begins at `start`."""
    digest, left = sha256(), end - begin
    file.seek(start + begin)
    while left:
        piece = file.read(min(left, 1 << 24))
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def _unequal(where: str, old: Any, new: Any) -> Iterator[str]:
    """A line for each value of two JSON trees that differs; lists by place, objects by key."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(key for key in new if key not in old)):
            if key not in old or key not in new:
                yield f"{where} {key} is only in {'the old' if key in old else 'the new'} engine"
            else:
                yield from _unequal(f"{where} {key}", old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from _unequal(f"{where}[{place}]", *pair)
    elif old != new or type(old) is not type(new):
        yield f"{where}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else "..." + text[-_SHOWN:]


def main(argv: list[str] | None = None) -> int:
    """Print the differences; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args(argv)
    num_engines = len(_engines(arguments.new))
    if not num_engines:
        parser.error(f"{arguments.new} holds no engine")
    found = differences(arguments.old, arguments.new)
    for line in found:
        print(line)
    print(f"{num_engines} engines, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

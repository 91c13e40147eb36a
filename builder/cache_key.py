"""A key for what a build would produce: builds with the same key produce the same engine.

It covers the values of every weight, unlike the hashes in an engine's config.json, so that a
checkpoint that was calibrated or trained again never gets an older checkpoint's engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import file_digest, sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.provenance import file_label
from llmctl.quantize.format import CONFIG_FILE

_COMPILERS = ("triton", "nvidia-cuda-nvrtc")  # what kernels are compiled with
_SOURCES = (".py", ".json", ".cu", ".cuh")  # source files that determine the content of an engine


def cache_key(engine: EnginePlan) -> str:
    """sha256, in hex, of the weights, the tokenizer, every resolved option, and the software.

    The folders' names and the command line are not part of it. Reads the whole checkpoint.
    """
    content = asdict(engine.config)
    for name in ("command", "files", "source"):
        del content[name]
    checkpoint = engine.checkpoint
    weights = {i.file for i in checkpoint.tensors.values() if i.file.name != CONFIG_FILE}
    files = (*weights, *checkpoint.tokenizer_files())
    content["inputs"] = {file_label(checkpoint, path): _digest(path) for path in files}
    content["software"] = _software_digest()
    if engine.config.compute_capability is not None:
        content["compilers"] = {package: _version(package) for package in _COMPILERS}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _software_digest() -> str:
    """Of the code that makes engines and their kernels; a version number alone does not change in a
    development clone."""
    root = Path(__file__).parent.parent
    folders = (root / "builder", root / "plugins", root / "quantize")
    files = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in _SOURCES)
    total = sha256()
    for path in files:
        total.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

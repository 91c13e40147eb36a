"""config.json of an engine directory: what is known of an engine before its file is read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from llmctl.builder.validation import strict_json
from llmctl.builder.validation.config import find_wrong_field
from llmctl.errors import CorruptEngine, EngineNotFound, RebuildNeeded
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, chosen_fp8
from llmctl.quantize.format import MAX_JSON_BYTES, not_a_file

SCHEMA_VERSION = 11
CONFIG_FILE = "config.json"
_MOST_LEVELS = 16  # of objects and lists within one another; `build` writes 5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """config.json of an engine directory, readable before any weight is read."""

    version: int  # SCHEMA_VERSION of the writer
    backend: str  # cpu | cuda | tensorrt | tensorrt-rtx
    pretrained_config: Mapping[str, Any]
    build_config: Mapping[str, Any]
    plugin_config: Mapping[str, Any]
    source: Mapping[str, Any]  # checkpoint path, file hashes
    tokenizer: Mapping[str, Any]  # files, hash of their content, vocab_size
    versions: Mapping[str, str]  # llmctl, torch, python, ...
    command: str
    files: Mapping[str, Any] = field(default_factory=dict)  # engine file -> bytes, header_sha256
    # what kernels and plans are compiled for, commas between several; None: nothing is
    compute_capability: str | None = None
    # load_format: auto (stored in the file), or dummy or planted and what they are generated from
    weights: Mapping[str, Any] = field(default_factory=lambda: {"load_format": "auto"})

    @property
    def num_ranks(self) -> int:
        """Ranks that run the engine together."""
        return int(self.build_config.get("tp_size", 1))

    @property
    def has_fp8_generation(self) -> bool:
        """Whether attention of every token has FP8 products; it has no kernels for trees then."""
        return chosen_fp8(self.plugin_config) is Fp8Tokens.ALL

    def to_json(self) -> str:
        """The document as stored: strict JSON, indented for people."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def require_file(path: Path) -> None:
    """Raise CorruptEngine where something else lies in the place of a file of an engine."""
    found = not_a_file(path)
    if found is not None:
        raise CorruptEngine(f"{path} is {found}; a file is wanted", fix="build the engine again")


def config_path(folder: Path) -> Path:
    """The config.json of an engine directory. Raises EngineNotFound where there is none,
    CorruptEngine where it is no file."""
    if folder.is_file():
        raise EngineNotFound(
            f"{folder} is a file; an engine directory is wanted", fix=f"give {folder.parent}"
        )
    path = folder / CONFIG_FILE
    require_file(path)
    if not path.is_file():
        found = f"is not an engine directory: it has no {CONFIG_FILE}"
        raise EngineNotFound(
            f"{folder} {found if folder.exists() else 'does not exist'}",
            fix=f"llmctl build --checkpoint-dir CHECKPOINT --output-dir {folder}",
        )
    return path


def _command_to_rebuild(command: object, folder: Path) -> str:
    """The command that built an engine, with its present folder. An engine may be a stranger's, so
    what is not one plain command of `llmctl build` is not shown."""
    here = shlex.quote(str(folder))
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        words = []
    if (
        words[:2] != ["llmctl", "build"]
        or shlex.join(words) != command
        or not command.isprintable()
    ):
        return f"llmctl build --checkpoint-dir CHECKPOINT --output-dir {here}"
    for at, word in enumerate(words):
        name, joined, _ = word.partition("=")
        if name.replace("_", "-") == "--output-dir":
            del words[at : at + 1 + (not joined)]
            break
    return shlex.join([*words, "--output-dir", str(folder)])


def read_engine_config(folder: Path) -> EngineConfig:
    """config.json of an engine directory.

    Raises EngineNotFound, CorruptEngine, or RebuildNeeded for another schema version.
    """
    path = config_path(folder)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CorruptEngine(
            f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read",
            fix="build the engine again",
        )
    try:
        raw = strict_json.parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptEngine(
            f"{path} is not valid JSON: {error}", fix="build the engine again"
        ) from error
    if not isinstance(raw, dict) or not {"version", "build_config"} <= set(raw):
        raise EngineNotFound(
            f"{path} is not the config of an engine (a checkpoint folder has one of that name)",
            fix="give the directory that `llmctl build` wrote",
        )
    if (found := raw["version"]) != SCHEMA_VERSION:
        is_newer = type(found) is int and found > SCHEMA_VERSION
        raise RebuildNeeded(
            f"{folder} has engine schema {found!r:.100}; this llmctl reads {SCHEMA_VERSION}",
            fix=f"{'install a newer llmctl, or ' if is_newer else ''}remove it and build again: "
            f"{_command_to_rebuild(raw.get('command'), folder)}",
        )
    names = {f.name for f in fields(EngineConfig)}
    if set(raw) != names:
        odd = sorted(set(raw) ^ names)[0]
        raise CorruptEngine(
            f"{path} {'has an unknown' if odd in raw else 'lacks the'} field {odd!r}",
            fix="build the engine again",
        )
    for name in (f.name for f in fields(EngineConfig) if str(f.type).startswith("Mapping")):
        if not isinstance(raw[name], dict):
            raise CorruptEngine(f"{path}: {name} is not an object", fix="build the engine again")
    if raw["backend"] not in tuple(BACKENDS):  # of any type
        raise CorruptEngine(
            f"{path} names the backend {raw['backend']!r}; known: {', '.join(BACKENDS)}",
            fix="build the engine again",
        )
    if strict_json.is_deeper(raw, _MOST_LEVELS):  # what shows or copies it goes down by calls
        wrong: str | None = f"it is nested in more than {_MOST_LEVELS} levels"
    else:
        wrong = find_wrong_field(raw)
    if wrong is not None:
        raise CorruptEngine(f"{path}: {wrong}", fix="build the engine again")
    return EngineConfig(**raw)

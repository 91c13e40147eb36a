"""What must be equal on all ranks before any of them opens an engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmctl.builder.engine_format import CONFIG_FILE
from llmctl.plugins.backends.cpu.binding import load_kernels

_SAID = {
    "version": "runs llmctl {theirs}; rank 0 runs {ours}",
    "kernels": "has CPU kernels of other sources ({theirs}); rank 0 has {ours}",
    "size": "is one of {theirs} ranks; rank 0 is one of {ours}",
}


def identity(rank: int, size: int, folders: Mapping[str, Path]) -> dict[str, Any]:
    """This process, as it introduces itself. config.json names size and header of every rank's
    file, so its hash tells whether engines are the same."""
    return {
        "rank": rank,
        "size": size,
        "version": version("llmctl"),
        "kernels": load_kernels().llmctl_source_hash().decode(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "engines": {
            role: sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()
            for role, folder in folders.items()
        },
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """What keeps another rank from running with rank 0; None: nothing."""
    for name, text in _SAID.items():
        if ours[name] != theirs.get(name):
            return text.format(ours=ours[name], theirs=theirs.get(name))
    for role, digest in ours["engines"].items():
        found = theirs.get("engines", {}).get(role)
        if found is None:
            return f"has no {role} engine; rank 0 has one"
        if found != digest:
            return f"has another {role} engine than rank 0 (config.json differs)"
    return None

"""Reading what a benchmark left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def raw(path: Path) -> list[list[dict[str, Any]]]:
    """[requests, steps] of a --raw file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [[item for item in lines if item["kind"] == kind] for kind in ("request", "step")]

"""`scripts/` is no package: pytest's `pythonpath` puts it where its files find each other."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def scripts(repository: Path) -> Path:
    return repository / "scripts"

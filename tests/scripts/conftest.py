import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    """`scripts/` is no package: its files import `demo.*` as they do when run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name == "demo" or name.startswith("demo.")]:
        del sys.modules[name]


@pytest.fixture
def scripts() -> Path:
    return SCRIPTS

"""The part of the loading benchmark that needs no GPU: which engines it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.bench import loading as bench_loading


@pytest.mark.parametrize(
    ("load_format", "is_taken"), [("auto", True), ("planted", False), ("dummy", False)]
)
def test_an_engine_that_makes_its_weights_is_refused(load_format, is_taken, monkeypatch):
    file = SimpleNamespace(config=SimpleNamespace(weights={"load_format": load_format}))
    monkeypatch.setattr(bench_loading.EngineFile, "open", lambda folder: file)
    if is_taken:
        assert bench_loading.open_whole(Path("engine")) is file
    else:
        with pytest.raises(SystemExit, match="build it from a whole checkpoint"):
            bench_loading.open_whole(Path("engine"))

"""The part of the loading benchmark that needs no GPU: which engines it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.bench import loading as bench_loading


@pytest.mark.parametrize(
    ("stored", "is_taken"), [((True, True), True), ((True, False), False), ((False,), False)]
)
def test_an_engine_that_makes_its_weights_is_refused(stored, is_taken, monkeypatch):
    tensors = [SimpleNamespace(is_stored=each) for each in stored]
    file = SimpleNamespace(plan=SimpleNamespace(tensors=tensors))
    monkeypatch.setattr(bench_loading.EngineFile, "open", lambda folder: file)
    if is_taken:
        assert bench_loading.open_whole(Path("engine")) is file
    else:
        with pytest.raises(SystemExit, match="build it from a whole checkpoint"):
            bench_loading.open_whole(Path("engine"))

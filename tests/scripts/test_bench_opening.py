"""What of the opening benchmark needs no GPU: phases of an opening, and engines that are stored."""

from __future__ import annotations

from pathlib import Path

import torch
from support.hostile_engine import build_tiny

from llmctl.builder.engine_format import open_engine
from scripts.bench.opening import measure, read_whole, write_stored


def test_phases_of_a_stored_engine_are_timed(tmp_path: Path) -> None:
    """On a CPU, where there are no weights to load and no device to start."""
    original = build_tiny(tmp_path, "fp8")
    write_stored(original, tmp_path / "stored")
    (plan, tensors), (wanted, _) = open_engine(tmp_path / "stored"), open_engine(original)
    assert plan == wanted
    for name, tensor in tensors.items():
        values = tensor.float()
        assert torch.isfinite(values).all() and 0 < values.min() <= values.max() < 2, name
    read_whole(tmp_path / "stored" / "rank0.engine")
    found = measure(tmp_path / "stored")
    phases = found["phases"]
    assert list(phases)[:3] == ["Python", "import llmctl", "check config.json, import torch"]
    assert "first token" in phases and all(seconds >= 0 for seconds in phases.values())
    assert found["load"] == ""

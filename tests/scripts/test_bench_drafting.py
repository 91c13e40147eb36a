"""What the names of the GPU benchmark's rows mean, and what a round of theirs must read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.planted import LoadFormat
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.engines.planted_text import tokens_per_round
from scripts.bench.cuda import TARGETS
from scripts.bench.drafting import find_drafting
from scripts.bench.rows import weight_bytes
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint
from scripts.models.planted_shapes import SHAPES


def test_a_row_names_its_engines() -> None:
    folder = Path("engines")
    pair = find_drafting("70b+1b-head8-k13")
    assert pair is not None and (pair.target, pair.steps, pair.published) == ("70b", 13, 191.74)
    assert pair.method(folder) == DraftEngine(folder / "1b-head8-draft", 13)
    heads = find_drafting("70b-medusa")
    assert heads is not None and (heads.target, heads.steps, heads.row) == (
        "70b-medusa",
        1,
        "heads",
    )
    assert heads.method(folder) == Medusa()
    assert find_drafting("8b-mxfp4") is None
    builder = (Path(__file__).parents[2] / "scripts/bench/build_engines").read_text()
    assert "$shape-medusa" in builder
    assert {"70b-medusa", "8b-medusa"} <= set(TARGETS.split(","))


def test_a_step_of_heads_reads_them_and_a_verification_does_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", Recipe("tiny", acceptance=0.65), config_only=True)

    def plan(**options: object):
        return plan_build(
            tmp_path / "target",
            BuildRequest(max_seq_len=64, max_batch_size=1, **options),
            backend="cuda",
            load_format=LoadFormat("planted", acceptance=0.65),
            with_binaries=False,
        )

    engine, plain = plan(speculative_decoding_mode="medusa"), plan()
    assert weight_bytes(engine.plan) == weight_bytes(plain.plan)
    opened = SimpleNamespace(
        target=SimpleNamespace(plan=engine.plan), checked=SimpleNamespace(target=engine.config)
    )
    heads = find_drafting("tiny-medusa")
    assert heads is not None
    shape = SHAPES["tiny"]
    weights = 4 * (shape.vocab + shape.hidden) * shape.hidden  # FP8
    assert heads.step_bytes(opened, 1000) == pytest.approx(weights, rel=0.02)
    choices = engine.limits.draft_heads["choices"]
    assert heads.expected_length(opened) == tokens_per_round({"acceptance": 0.65}, choices)
    assert heads.expected_length(opened) == pytest.approx(3.5, abs=0.05)

"""What the names of the GPU benchmark's rows mean, and what a round of theirs must read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
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
    chain = find_drafting("8b-eagle")
    assert chain is not None and (chain.target, chain.steps) == ("8b-eagle", 5)
    assert chain.method(folder) == Eagle(5)
    short = find_drafting("70b-eagle-tree-d6")
    assert short is not None and (short.target, short.steps) == ("70b-eagle-tree", 6)
    assert short.method(folder) == Eagle(num_offers=10, depth=6)
    ahead = find_drafting("8b-lookahead")
    assert ahead is not None and ahead.method(folder) == LookaheadDecoding()
    assert find_drafting("8b-mxfp4") is None
    builder = (Path(__file__).parents[2] / "scripts/bench/build_engines").read_text()
    assert "$shape-medusa" in builder and "$shape-eagle" in builder
    named = {f"{shape}-{mode}" for shape in ("70b", "8b") for mode in ("medusa", "eagle")}
    assert named <= set(TARGETS.split(","))


def plan(folder: Path, acceptance: float, **options: object) -> EnginePlan:
    if not folder.exists():
        write_checkpoint(folder, Recipe("tiny", acceptance=acceptance), config_only=True)
    return plan_build(
        folder,
        BuildRequest(max_seq_len=64, max_batch_size=1, **options),
        backend="cuda",
        load_format=LoadFormat("planted", acceptance=acceptance),
        with_binaries=False,
    )


def opened_as(engine: EnginePlan) -> SimpleNamespace:
    return SimpleNamespace(
        target=SimpleNamespace(plan=engine.plan, tokens_per_block=32),
        checked=SimpleNamespace(target=engine.config),
    )


def test_a_step_of_heads_reads_them_and_a_verification_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    engine = plan(folder, 0.65, speculative_decoding_mode="medusa")
    assert weight_bytes(engine.plan) == weight_bytes(plan(folder, 0.65).plan)
    opened = opened_as(engine)
    heads = find_drafting("tiny-medusa")
    assert heads is not None
    shape = SHAPES["tiny"]
    weights = 4 * (shape.vocab + shape.hidden) * shape.hidden  # FP8
    assert heads.step_bytes(opened, 1000) == pytest.approx(weights, rel=0.02)
    choices = engine.limits.draft_heads["choices"]
    assert heads.expected_length(opened) == tokens_per_round({"acceptance": 0.65}, choices)
    assert heads.expected_length(opened) == pytest.approx(3.5, abs=0.05)


def test_a_step_of_an_eagle_head_reads_its_layer_its_vocabulary_and_its_cache(
    tmp_path: Path,
) -> None:
    """And the expected tokens of a round are those of a chain: 3.6 at 0.79."""
    options = {"speculative_decoding_mode": "eagle", "eagle_layers": "0,1,1"}
    opened = opened_as(plan(tmp_path / "target", 0.79, **options))
    chain = find_drafting("tiny-eagle")
    assert chain is not None
    shape = SHAPES["tiny"]
    layer = shape.hidden * (2 * shape.hidden + 3 * shape.hidden + 3 * shape.intermediate)
    extend = 3 * shape.hidden**2
    numbers = extend / 5 + layer + shape.vocab // 4 * shape.hidden  # of one byte
    cached = 1000 * 2 * 128 * 2  # keys and values of two heads of 64, BF16
    wanted = numbers + cached + 4 * shape.vocab
    assert chain.step_bytes(opened, 1000) == pytest.approx(wanted, rel=0.05)
    assert chain.expected_length(opened) == pytest.approx(3.6, abs=0.01)

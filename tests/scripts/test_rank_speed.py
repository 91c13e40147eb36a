"""The computed speed of several ranks: for one rank it is the measured one, and bytes are those of
plans."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.planted import LoadFormat
from llmctl.cli.inspect.cost import Step, meetings, step_bytes
from scripts.bench.plan_support import plan_shape
from scripts.bench.rows import weight_bytes
from scripts.bench.slices import parse, slice_of
from scripts.models import rank_speed
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint
from scripts.models.planted_shapes import SHAPES
from scripts.models.rank_speed import Pair

PAGE = "docs/performance/tensor_parallel.md"


@pytest.mark.parametrize("size", ["1b", "3b", "8b", "70b"])
def test_a_step_of_one_rank_is_the_measured_one(h200_rows: dict[str, float], size: str) -> None:
    low, high = rank_speed.step_ms(SHAPES[size], 1)
    assert low == high == pytest.approx(h200_rows[f"decode-{size}"], rel=0.01)


@pytest.mark.parametrize(
    ("row", "draft", "drafts", "acceptance"),
    [
        ("70b+1b", "1b", 10, 0.873),
        ("70b+1b-k13", "1b", 13, 0.873),
        ("70b+3b", "3b", 10, 0.873),
        ("70b+8b", "8b", 10, 0.873),
        ("70b+8b-k8", "8b", 8, 0.873),
        ("70b+8b-p916", "8b", 10, 0.916),
    ],
)
def test_a_round_of_one_rank_is_the_measured_one(
    h200_rows: dict[str, float], row: str, draft: str, drafts: int, acceptance: float
) -> None:
    found = rank_speed.best_round(Pair("70b", draft, acceptance), 1, drafts)
    assert found.draft_ranks == 1
    measured = {name: h200_rows[f"pair-{row}-{name}"] for name in ("draft-step", "verify", "round")}
    assert found.draft_ms[0] == pytest.approx(measured["draft-step"], rel=0.03)
    assert found.verify_ms[0] == pytest.approx(measured["verify"], rel=0.01)
    assert found.round_ms[0] == pytest.approx(measured["round"], rel=0.01)


@pytest.mark.parametrize(("size", "ranks"), [("8b", 1), ("8b", 2), ("3b", 8), ("1b", 4)])
def test_bytes_and_meetings_are_those_of_a_plan(tmp_path: Path, size: str, ranks: int) -> None:
    """But for activations, norms and scales: less than 1 %."""
    write_checkpoint(tmp_path / size, Recipe(size), config_only=True)
    request = BuildRequest(max_seq_len=2048, max_num_tokens=64, tp_size=ranks)
    elsewhere = LoadFormat(has_files=False)
    engine = plan_build(
        tmp_path / size, request, backend="cpu", load_format=elsewhere, with_binaries=False
    )
    step = Step(1, rank_speed.CONTEXT)
    shape = SHAPES[size]
    assert rank_speed.read_bytes(shape, ranks) == pytest.approx(
        step_bytes(engine.plan, step), rel=0.01
    )
    assert rank_speed.weight_bytes(shape, ranks) == pytest.approx(
        engine.summary()["weight_bytes"], rel=0.01
    )
    met = meetings(engine.plan, step)
    sums = [meeting.num_bytes for meeting in met if meeting.is_sum]
    assert sums == ([4 * shape.hidden] * (2 * shape.layers) if ranks > 1 else [])
    assert [m.num_bytes for m in met if not m.is_sum] == (
        [8 * -(-rank_speed.head_rows(shape, ranks) // 1024)] if ranks > 1 else []
    )


def test_a_head_reads_what_a_rank_reads_of_its_graphs(tmp_path: Path) -> None:
    shape = SHAPES["8b"]
    write_checkpoint(tmp_path / "8b", Recipe("8b"), config_only=True)
    for ranks in (1, 4):
        request = BuildRequest(
            max_seq_len=2048, tp_size=ranks, speculative_decoding_mode="redrafter"
        )
        load_format = LoadFormat("planted")
        engine = plan_build(
            tmp_path / "8b", request, backend="cuda", load_format=load_format, with_binaries=False
        )
        for graph in engine.plan.heads:
            found = rank_speed.recurrent_bytes(shape, ranks)
            assert found == pytest.approx(weight_bytes(engine.plan, graph), rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "draft_ms", "verify_ms", "times"),
    [(1, 3.235, 17.3, 2.72), (2, 1.772, 10.0, 2.59), (4, 1.014, 6.81, 2.32)],
)
def test_rounds_of_a_head_take_what_was_measured(
    ranks: int, draft_ms: float, verify_ms: float, times: float
) -> None:
    """70B on H200s (docs/performance/tensor_parallel.md); prompts are left out of what is computed,
    which is why it is faster over plain decoding."""
    head, shape = rank_speed.HEAD, SHAPES["70b"]
    draft = rank_speed.recurrent_ms(head, ranks)
    verify = rank_speed.step_ms(shape, ranks, 21)
    assert sum(draft) / 2 == pytest.approx(draft_ms, rel=0.02)
    assert sum(verify) / 2 == pytest.approx(verify_ms, rel=0.04)
    found = head.tokens * sum(rank_speed.step_ms(shape, ranks)) / (sum(draft) + sum(verify))
    assert times < found < 1.025 * times


def test_a_draft_is_divided_where_that_is_faster() -> None:
    beside = {n: rank_speed.best_round(Pair("70b", "1b"), n, 10).draft_ranks for n in (1, 2, 4, 8)}
    assert beside == {1: 1, 2: 1, 4: 4, 8: 8}
    assert rank_speed.best_round(Pair("405b", "8b"), 4, 10).draft_ranks == 4


def test_405b_fits_on_four_and_the_best_length_is_no_worse_than_ten() -> None:
    assert [rank_speed.fits(Pair("405b", "8b"), n) for n in (1, 2, 4, 8)] == [
        False,
        False,
        True,
        True,
    ]
    for ranks in (1, 8):
        ten = rank_speed.best_round(Pair("70b", "1b"), ranks, 10)
        best = rank_speed.best_length(Pair("70b", "1b"), ranks)
        assert best.tokens / sum(best.round_ms) >= ten.tokens / sum(ten.round_ms)


def test_the_page_has_the_computed_tables_and_says_that_they_are(repository: Path) -> None:
    page = (repository / PAGE).read_text()
    assert rank_speed.write(page) == page, (
        f"run: python -m scripts.models.rank_speed --write {PAGE}"
    )
    computed = page.index("## Computed")
    assert page.index("## Measured") < computed < page.index(rank_speed.MARKS[0])
    for tokens in (9, 11, 14):
        assert rank_speed.growth_us(tokens) == pytest.approx(0.98 + 0.445 * tokens, rel=0.01)


@pytest.mark.parametrize(("size", "ranks"), [("8b", 8), ("3b", 2)])
def test_a_slice_reads_what_a_rank_reads(size: str, ranks: int) -> None:
    """The benchmark of slices measures what the model computes with."""
    request = BuildRequest(max_batch_size=4, max_seq_len=4096)
    plan, _ = plan_shape(slice_of(SHAPES[size], ranks), request, "FP8", "fp8")
    found = step_bytes(plan, Step(1, rank_speed.CONTEXT))
    assert found == pytest.approx(rank_speed.read_bytes(SHAPES[size], ranks), rel=0.01)
    assert not plan.fused, "ranks run launches"


def test_slices_are_named_by_shape_and_ranks() -> None:
    assert parse("70b:2,8") == ("70b", [2, 8])
    for text in ("70b", "7b:2"):
        with pytest.raises(ArgumentTypeError, match="one of tiny, 1b"):
            parse(text)

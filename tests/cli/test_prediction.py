"""What `inspect` predicts of a step of an engine of several ranks, and says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.cli.gpus import CPU_STEP_SHARE, GPUS, READ_SHARE
from llmctl.cli.inspect.by_ranks import span, steps_by_ranks
from llmctl.cli.inspect.cost import Step, meetings, step_bytes
from llmctl.cli.inspect.engine_text import head_line, step_line, step_lines_by_ranks
from llmctl.cli.inspect.prediction import (
    Prediction,
    fastest,
    predict_head,
    predict_on_gpu,
    predict_step,
)
from llmctl.cli.rank_speed import HEAD_WAIT_S, MORE_S, RankStep, rank_time
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

STEP = Step(1, 1000)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], EnginePlan]:
    """An engine of 8B's shape of so many ranks for a backend."""
    folder = tmp_path_factory.mktemp("8b") / "config"
    write_checkpoint(folder, Recipe("8b"), config_only=True)

    def make(ranks: int, backend: str) -> EnginePlan:
        request = BuildRequest(max_seq_len=2048, tp_size=ranks)
        elsewhere = LoadFormat(has_files=False)
        return plan_build(
            folder, request, backend=backend, load_format=elsewhere, with_binaries=False
        )

    return make


def test_ranks_of_gpus_read_wait_and_meet(plan) -> None:
    engine = plan(2, "cuda")
    found = predict_step(engine.config, engine.plan, STEP, "h200", None)
    read, met = step_bytes(engine.plan, STEP), meetings(engine.plan, STEP)
    time = rank_time(GPUS["h200"], RankStep(2, 32, read, met))
    assert time is not None and len(met) == 65
    assert found["num_meetings"] == 65 and found["memory"] == "h200"
    least, most = found["meetings_ms"]
    assert most - least == pytest.approx(65e3 * MORE_S[2])
    assert found["predicted_ms"] == pytest.approx(1e3 * sum(time.bounds_s) / 2)
    assert found["read_bytes_s"] == pytest.approx(read / time.alone_s)
    assert f"of which 65 meetings of ranks are {span(least, most)} ms" in step_line(found)


def test_one_rank_meets_nobody(plan) -> None:
    engine = plan(1, "cuda")
    found = predict_step(engine.config, engine.plan, STEP, "h200", None)
    assert found["num_meetings"] == 0 and found["meetings_ms"] == [0, 0]
    assert found["predicted_ms"] == pytest.approx(1e3 * found["read_bytes"] / found["read_bytes_s"])
    assert "meetings" not in step_line(found)


def test_another_bandwidth_changes_reading_alone(plan) -> None:
    engine = plan(2, "cuda")
    gb_s = GPUS["h200"].read_bytes_s * READ_SHARE / 1e9
    named = predict_step(engine.config, engine.plan, STEP, "h200", None)
    given = predict_step(engine.config, engine.plan, STEP, None, gb_s)
    assert given["predicted_ms"] == pytest.approx(named["predicted_ms"])
    half = predict_step(engine.config, engine.plan, STEP, None, gb_s / 2)
    more = half["predicted_ms"] - given["predicted_ms"]
    assert more == pytest.approx(1e3 * named["read_bytes"] / (gb_s * 1e9))


def test_gpus_that_nothing_joins_are_said_to_be_unknown(plan) -> None:
    engine = plan(4, "cuda")
    found = predict_step(engine.config, engine.plan, STEP, "h100-nvl", None)
    assert found["predicted_ms"] is None and found["read_bytes_s"] is None
    assert "of h100-nvl too little is known to predict its time" in step_line(found)


def test_ranks_of_a_cpu_share_its_bandwidth(plan) -> None:
    for ranks in (1, 2):
        engine = plan(ranks, "cpu")
        found = predict_step(engine.config, engine.plan, STEP, None, 100.0)
        assert found["read_bytes_s"] == pytest.approx(100e9 * CPU_STEP_SHARE / ranks)
        meet = "and whatever 65 meetings of ranks take"
        assert step_line(found).endswith(meet) == (ranks == 2)
        unknown = predict_step(engine.config, engine.plan, STEP, None, None)
        assert step_line(unknown).endswith("(times: --read-bandwidth GB/S)")


def test_the_fewest_ranks_within_two_percent_are_fastest() -> None:
    assert fastest({1: (1.0, 1.0), 2: (0.9, 1.09), 4: (0.98, 1.0)}) == 1
    assert fastest({1: (1.0, 1.0), 2: (0.9, 1.0), 4: (0.94, 0.96)}) == 2


def test_text_of_an_engine_says_what_is_of_one_rank(llmctl, rank_engines) -> None:
    done = llmctl("inspect", rank_engines.target, "--read-bandwidth", 20)
    rows = [" ".join(row.split()) for row in done.out.splitlines()]
    assert any(row.startswith("ranks 2, each with ") for row in rows)
    assert any("meetings of ranks take" in row for row in rows)
    assert {"rank0.engine", "rank1.engine"} <= {row.split()[0] for row in rows if row}


def test_a_page_draws_engines_of_ranks(llmctl, rank_engines, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert llmctl("inspect", rank_engines.target, "--graph", page).code == 0
    assert "all_reduce" in page.read_text() and "all_gather" in page.read_text()


@pytest.mark.parametrize("own", [1, 4])
def test_other_numbers_of_ranks_are_computed_from_the_engine_s_own_plan(plan, own: int) -> None:
    """As their plans have it, but for what every rank reads whole."""
    engine = plan(own, "cuda")
    found = steps_by_ranks(engine.config, engine.plan, STEP, GPUS["h200"])
    assert list(found) == [1, 2, 4, 8]
    for ranks, bounds in found.items():
        other = plan(ranks, "cuda")
        wanted = predict_on_gpu(other.config, other.plan, STEP, GPUS["h200"]).bounds_s
        assert bounds == pytest.approx(wanted, rel=0.01)
    assert list(steps_by_ranks(engine.config, engine.plan, STEP, GPUS["h100-nvl"])) == [1, 2]


def test_a_draft_engine_has_one_rank_or_as_many_as_its_target() -> None:
    """By more than 2 %: else one rank has nobody to meet."""
    steps = {1: (0.404, 0.404), 2: (0.449, 0.515), 4: (0.37, 0.43), 8: (0.342, 0.408)}
    beside = "1 beside a target of 2, 1 beside a target of 4, 8 beside a target of 8"
    by_ranks, draft = step_lines_by_ranks(steps)
    assert draft == f"ranks of it as a draft engine: {beside}"
    assert by_ranks.endswith(
        "ms: 0.404 on 1, 0.449 to 0.515 on 2, 0.37 to 0.43 on 4, 0.342 to 0.408 on 8"
    )
    assert not list(step_lines_by_ranks({1: (0.404, 0.404)}))


@pytest.mark.parametrize(("mode", "met"), [("redrafter", 4), ("medusa", 4), ("eagle", 0)])
def test_a_step_of_a_head_has_its_own_line(tmp_path: Path, mode: str, met: int) -> None:
    """Of FP8 heads of 8B: reading of a rank's rows, waiting, and the meetings of four ranks."""
    write_checkpoint(tmp_path / "8b", Recipe("8b"), config_only=True)
    found: dict[int, Prediction] = {}
    for ranks in (1, 4):
        more = {"num_medusa_heads": 3} if mode == "medusa" else {}
        request = BuildRequest(
            max_seq_len=2048, tp_size=ranks, speculative_decoding_mode=mode, **more
        )
        engine = plan_build(
            *(tmp_path / "8b", request),
            backend="cuda",
            load_format=LoadFormat("planted"),
            with_binaries=False,
        )
        (name, *_) = engine.plan.heads
        found[ranks] = predict_head(engine.config, engine.plan, name, GPUS["h200"])
        assert predict_head(engine.config, engine.plan, name, None).bounds_s is None
        bounds = found[ranks].bounds_s
        told = head_line(
            {
                "read_bytes": found[ranks].read_bytes,
                "predicted_ms": bounds and [1e3 * bound for bound in bounds],
                "num_meetings": found[ranks].num_meetings,
            }
        )
        assert ("predicted" in told) == (mode != "eagle")
        assert (f"with {met} meetings of ranks" in told) == (ranks == 4 and met > 0)
    assert (found[1].num_meetings, found[4].num_meetings) == (0, met)
    if mode == "eagle":
        assert found[1].read_bytes == found[4].read_bytes and found[4].bounds_s is None
        return
    assert found[4].read_bytes == pytest.approx(found[1].read_bytes / 4, rel=0.01)
    one, four = found[1].bounds_s, found[4].bounds_s
    assert one is not None and four is not None
    read_s = found[1].read_bytes / (GPUS["h200"].read_bytes_s * READ_SHARE)
    assert one[0] == one[1] == pytest.approx(read_s + HEAD_WAIT_S)
    assert read_s / 4 + HEAD_WAIT_S < four[0] < four[1] < read_s / 4 + HEAD_WAIT_S + met * 6e-6

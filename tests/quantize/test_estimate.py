"""What `llmctl quantize` says of its time, and how its threads wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from llmctl.cli.quantize import _tell_time
from llmctl.quantize.estimate import TimeEstimate
from llmctl.quantize.quantizer import run_quantization


def test_the_first_batch_is_not_counted_and_the_estimate_comes_once() -> None:
    times_s = iter([7.0, 9.0])  # after the first batch, and after four more
    told: list[float] = []
    estimate = TimeEstimate(100, told.append, lambda: next(times_s))
    for _ in range(4):
        estimate.batch_done()
    assert not told
    for _ in range(96):
        estimate.batch_done()
    assert told == [50.0]


@pytest.mark.parametrize(("rows", "count"), [(4, 1), (2, 0)])
def test_every_batch_of_every_layer_counts(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    rows: int,
    count: int,
) -> None:
    told: list[float] = []
    plan = plan_tiny(checkpoints(), tmp_path / "out", calib_size=rows, batch_size=1)
    assert plan.model.num_layers == 2  # 8 batches, or 4: too few
    result = run_quantization(plan, on_estimate=told.append)
    assert len(told) == count and all(0 < seconds_s < 8 * result.seconds_s for seconds_s in told)


@pytest.mark.parametrize(
    ("dtype", "device", "seconds_s", "said"),
    [
        ("float16", "cpu", 240.0, "about 4.0 minutes at this speed; half the --calib-size"),
        ("float16", "cpu", 240.0, "--dtype bfloat16 is several times as fast"),
        ("float16", "cpu", 59.0, None),
        ("bfloat16", "cuda", 90.0, "about 1.5 minutes at this speed\n"),
    ],
)
def test_a_long_calibration_is_announced_with_what_makes_it_shorter(
    capsys: pytest.CaptureFixture[str],
    dtype: str,
    device: str,
    seconds_s: float,
    said: str | None,
) -> None:
    plan: Any = SimpleNamespace(dtype=dtype, options=SimpleNamespace(device=device))
    _tell_time(Console(highlight=False), plan, seconds_s)
    out = capsys.readouterr().out
    assert said in out if said is not None else out == ""

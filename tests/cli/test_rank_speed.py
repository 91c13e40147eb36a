"""The time of a step of several ranks, computed from what one GPU was measured to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.cli.gpus import FOUR_BIT_SHARES, GPUS, READ_SHARE, STEP_SHARES
from llmctl.cli.rank_speed import (
    FOUR_BIT_WAITS,
    LAYER_WAITS,
    MORE_S,
    NORM_S,
    PART_WAITS,
    WHOLE_WAITS,
    Meeting,
    RankStep,
    layer_wait_s,
    meeting_s,
    rank_time,
)
from llmctl.plugins.ops.all_reduce.peers import hops_of
from scripts.models import rank_speed as model
from scripts.models.planted_shapes import SHAPES as SHAPES_OF_MODELS

H200 = GPUS["h200"]
SHAPES = {  # of tactics.json, and their layers
    "h2048.i8192.a32.8x64": 16,
    "h3072.i8192.a24.8x128": 28,
    "h4096.i14336.a32.8x128": 32,
}
# us of TensorRT-LLM's all-reduce on H200s, by ranks, for so many KB (AIConfigurator's data)
ALL_REDUCE_KB = (16, 64, 128, 256)
ALL_REDUCE_US = {
    2: (2.8, 3.0, 3.1, 3.6),
    4: (3.2, 3.6, 4.2, 5.4),
    8: (3.5, 4.6, 6.4, 10.1),
}


@pytest.mark.parametrize(
    ("scheme", "waits", "shares"),
    [("", WHOLE_WAITS, STEP_SHARES), (".mxfp4", FOUR_BIT_WAITS, FOUR_BIT_SHARES)],
)
def test_layers_wait_as_they_were_measured_in_launches(
    repository: Path, scheme: str, waits: tuple, shares: tuple
) -> None:
    """Reading and waiting make up the measured step; the bytes are those of the same models."""
    tactics = repository / "plugins/fused/decoder_layers/tactics.json"
    measured_ms = json.loads(tactics.read_text())["ms"]
    for (shape, layers), (layer_bytes, wait_s), (step_bytes, _) in zip(
        SHAPES.items(), waits, shares, strict=False
    ):
        assert layer_bytes == pytest.approx(step_bytes / layers, rel=0.01)
        step_s = step_bytes / (H200.read_bytes_s * READ_SHARE) + layers * wait_s
        found = measured_ms[shape + scheme]["1024"]["launches"]
        assert 1e3 * step_s == pytest.approx(found, rel=0.01)


def test_parts_are_those_that_ranks_read() -> None:
    parts = [(size, ranks) for size in ("8b", "70b") for ranks in (8, 4, 2)]
    assert len(parts) == len(PART_WAITS)
    for (size, ranks), (layer_bytes, wait_s) in zip(parts, PART_WAITS, strict=True):
        shape = SHAPES_OF_MODELS[size]
        assert layer_bytes == pytest.approx(model.read_bytes(shape, ranks) / shape.layers, rel=0.01)
        assert layer_wait_s(layer_bytes) == pytest.approx(wait_s)


def test_a_step_of_70b_is_what_one_gpu_took(h200_rows: dict[str, float]) -> None:
    """Its layers are launches on one rank, too, so the model of ranks has to give that."""
    read_bytes, _ = STEP_SHARES[-1]
    time = rank_time(H200, RankStep(1, 80, int(read_bytes), [Meeting(1 << 15)] * 160))
    assert time is not None and time.least_s == 0
    assert 1e3 * time.alone_s == pytest.approx(h200_rows["decode-70b"], rel=0.01)


@pytest.mark.parametrize("ranks", ALL_REDUCE_US)
def test_meetings_take_what_was_published(ranks: int) -> None:
    for kilobytes, published_us in zip(ALL_REDUCE_KB, ALL_REDUCE_US[ranks], strict=True):
        one_hop = Meeting(kilobytes << 10, is_sum=False)
        assert 1e6 * meeting_s(H200, ranks, one_hop) == pytest.approx(published_us, rel=0.07)


def test_large_sums_take_two_hops_and_small_ones_one() -> None:
    """Those with a norm; the kernel decides alike for what a step may have."""
    for ranks, hops in ((2, 1), (4, 2), (8, 2)):
        small, large = (Meeting(size, has_norm=True) for size in (1 << 12, 1 << 20))
        one_hop = meeting_s(H200, ranks, replace(large, has_norm=False))
        assert (meeting_s(H200, ranks, large) < 0.75 * one_hop) == (hops == 2)
        norm = meeting_s(H200, ranks, small) - meeting_s(
            H200, ranks, replace(small, has_norm=False)
        )
        assert norm == pytest.approx(NORM_S)
        assert hops_of(ranks, 32, 8192) == hops


@pytest.mark.parametrize(("size", "measured_ms"), [("8b", 1.719), ("70b", 12.296)])
def test_steps_of_two_gpus_are_what_they_were_measured_to_take(
    monkeypatch: pytest.MonkeyPatch, size: str, measured_ms: float
) -> None:
    """Two H100s, 500 to 1,012 tokens of context (docs/performance/tensor_parallel.md). 8B is
    computed to take 3 % longer: its part was timed with norms in launches of their own."""
    monkeypatch.setattr(model, "CARD", GPUS["h100"])
    monkeypatch.setattr(model, "CONTEXT", 756)
    low, high = model.step_ms(SHAPES_OF_MODELS[size], 2)
    assert low == high == pytest.approx(measured_ms, rel=0.035)


def test_waits_are_between_those_measured() -> None:
    sizes = [10.0**exponent for exponent in range(6, 11)]
    assert layer_wait_s(sizes[0]) == LAYER_WAITS[0][1]
    assert layer_wait_s(sizes[-1]) == pytest.approx(LAYER_WAITS[-1][1])
    (low, one), (high, other) = LAYER_WAITS[-2:]
    assert layer_wait_s((low * high) ** 0.5) == pytest.approx((one + other) / 2)


def test_bounds_differ_by_what_meetings_may_take_more() -> None:
    time = rank_time(H200, RankStep(8, 80, 9_000_000_000, [Meeting(1 << 15)] * 160))
    assert time is not None
    least, most = time.bounds_s
    assert most - least == pytest.approx(160 * MORE_S[8])
    meetings_s = 160 * meeting_s(H200, 8, Meeting(1 << 15))
    assert least == pytest.approx(time.alone_s + meetings_s)


def test_nothing_is_said_of_gpus_that_nothing_joins() -> None:
    step = RankStep(4, 32, 10**9, [])
    assert rank_time(GPUS["h100-nvl"], step) is None, "a bridge joins two"
    assert rank_time(GPUS["h100-nvl"], replace(step, num_ranks=2)) is not None
    assert rank_time(GPUS["l40s"], replace(step, num_ranks=2)) is None
    assert rank_time(replace(H200, read_bytes_s=None), step) is None
    for gpu in GPUS.values():
        assert (gpu.link_bytes_s > 0) == (gpu.most_linked > 1)

"""The limit that a run is compared with: a share of at most 100 %, or the word that it is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmctl.cli.bench.hardware import EXCEEDED, Reads, limit_json, measure_cpu
from llmctl.cli.bench.records import Round, StepRecord
from llmctl.cli.bench.table import figures
from llmctl.plugins.backends.cuda.read_rate import array_bytes

READS = Reads(
    target_weights=8_000_000, draft_weights=0, target_kv_per_block=0, draft_kv_per_block=0
)


def step(ms: float, num_drafts: int = 0, depth: int = 0) -> StepRecord:
    """A step of one round for one request, which reads 8 MB without drafts."""
    rounds = [Round(0, num_drafts, accepted_tokens=0, tokens=1, draft_depth=depth)]
    return StepRecord(0, 0.0, ms, 0.0, 0.0, 0, 0, 1, 0, 0, 8, rounds)


@pytest.mark.parametrize(("ms", "share"), [(1.0, 1.0), (2.0, 0.5), (0.9, None)])
def test_a_share_is_at_most_the_whole_limit(ms: float, share: float | None) -> None:
    limit = limit_json(READS, 8e9, [step(ms), step(ms)])
    assert limit is not None and limit["floor_per_step_ms"] == pytest.approx(1.0)
    assert limit["is_exceeded"] == (share is None)
    assert limit["share_of_limit"] == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize(("ms", "cell"), [(2.0, ("50", "%")), (0.9, ("none", EXCEEDED))])
def test_the_table_says_so(ms: float, cell: tuple[str, str]) -> None:
    lengths = {"avg_input_length_tokens": 1, "avg_output_length_tokens": 1}
    report = {
        "request_info": lengths,
        "performance": {},
        "load": {"request_rate_req_s": None},
        "decoding_stats": None,
        "kv_cache": None,
        "hardware_limit": limit_json(READS, 8e9, [step(ms)]),
    }
    rows = {label: (value, unit) for label, value, unit in figures(report)}
    assert rows["share of that limit"] == cell


def test_a_draft_engine_is_read_once_a_level() -> None:
    """Of a chain for every draft, of a tree for all drafts of a level."""
    reads = replace(READS, draft_weights=1_000_000)
    assert reads.step_bytes(step(1.0, 4, 4)) == 12_000_000
    assert reads.step_bytes(step(1.0, 16, 4)) == 12_000_000


def test_there_is_no_limit_without_a_bandwidth_or_steps_that_generate() -> None:
    assert limit_json(READS, None, [step(1.0)]) is None
    assert limit_json(READS, 8e9, []) is None


@pytest.mark.parametrize(
    ("free_gib", "wanted_gib"), [(130, 8), (70, 8), (30, 4), (7.5, 1), (7, None), (0, None)]
)
def test_arrays_fit_into_what_is_free(free_gib: float, wanted_gib: int | None) -> None:
    found = array_bytes(int(free_gib * 2**30))
    if wanted_gib is None:
        assert found is None
    else:
        assert found is not None and found % (8192 * 4) == 0
        assert found == pytest.approx(wanted_gib * 2**30, rel=1e-3)


def test_a_cpu_reads_at_a_rate() -> None:
    assert 1e9 < measure_cpu(1 << 20) < 1e13

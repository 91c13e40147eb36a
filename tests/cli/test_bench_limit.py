"""The limit that a run is compared with: a share of at most 100 %, or the word that it is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import pytest
import torch
from support.kernel import compile_all

from llmctl.cli.bench import hardware, session
from llmctl.cli.bench.hardware import EXCEEDED, Reads, limit_json, measure_cpu
from llmctl.cli.bench.records import Round, StepRecord
from llmctl.cli.bench.table import figures
from llmctl.plugins.backends.cuda import read_rate
from llmctl.plugins.backends.cuda.arch import ARCHS
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.read_rate import ReadRate, array_bytes

RATE = ReadRate(8e9, "by hand")
READS = Reads(
    target_weights=8_000_000, draft_weights=0, target_kv_per_block=0, draft_kv_per_block=0
)


def step(ms: float, num_drafts: int = 0, depth: int = 0) -> StepRecord:
    """A step of one round for one request, which reads 8 MB without drafts."""
    rounds = [Round(0, num_drafts, accepted_tokens=0, tokens=1, draft_depth=depth)]
    return StepRecord(0, 0.0, ms, 0.0, 0.0, 0, 0, 1, 0, 0, 8, rounds)


@pytest.mark.parametrize(("ms", "share"), [(1.0, 1.0), (2.0, 0.5), (0.9, None)])
def test_a_share_is_at_most_the_whole_limit(ms: float, share: float | None) -> None:
    limit = limit_json(READS, RATE, [step(ms), step(ms)])
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
        "hardware_limit": limit_json(READS, RATE, [step(ms)]),
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
    assert limit_json(READS, RATE, []) is None


@pytest.mark.parametrize(
    ("free_gib", "wanted_gib"), [(130, 8), (70, 8), (30, 4), (7.5, 1), (7, None), (0, None)]
)
def test_arrays_fit_into_what_is_free(free_gib: float, wanted_gib: int | None) -> None:
    found = array_bytes(int(free_gib * 2**30))
    if wanted_gib is None:
        assert found is None
    else:
        assert found is not None and found % (4 * read_rate.TILE) == 0
        assert found == pytest.approx(wanted_gib * 2**30, rel=1e-3)


def test_a_cpu_reads_at_a_rate() -> None:
    rate = measure_cpu(1 << 20)
    assert 1e9 < rate.bytes_per_s < 1e13 and "threads" in rate.measurement


def test_a_run_faster_than_its_limit_is_a_finding_about_the_measurement(
    bench, tmp_path, monkeypatch
) -> None:
    page = tmp_path / "report.html"
    monkeypatch.setattr(hardware, "_measure_cpu", lambda num_bytes: 1.0)  # a byte a second
    report, _ = bench("latency", "--report", page)
    assert report["hardware_limit"]["is_exceeded"]
    assert report["hardware_limit"]["share_of_limit"] is None
    assert EXCEEDED in page.read_text() and "% of this limit" not in page.read_text()
    monkeypatch.setattr(hardware, "_measure_cpu", lambda num_bytes: 1e18)
    report, _ = bench("latency", "--report", page)
    assert report["hardware_limit"]["share_of_limit"] < 1e-3
    assert "% of this limit" in page.read_text()


# ---- what is kept of a GPU ----


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A GPU that reads at `rates`, one measurement after the other; counts them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = SimpleNamespace(
        uuid="12-ab", capability=(9, 0), free=100 << 30, rates=[4.0, 4.5], count=0
    )
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: SimpleNamespace(name="NVIDIA H200", uuid=found.uuid),
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: found.capability)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (found.free, 141 << 30))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)

    def measure(num_bytes: int) -> dict[tuple[str, int], list[float]]:
        rate = found.rates[found.count]
        found.count += 1
        share, turns = read_rate.PATTERNS
        return {(share, 0): [rate - 1] * 3, (turns, 3): [rate, rate, 9.0]}

    monkeypatch.setattr(read_rate, "read_rates", measure)
    return found


def test_a_rate_is_measured_once_a_card_and_kept(card) -> None:
    first = read_rate.device_read_rate()
    assert first is not None and first.bytes_per_s == 4e12  # the median of the fastest pattern
    assert "tiles in turns" in first.measurement and "6 places" in first.measurement
    assert read_rate.device_read_rate() == first and card.count == 1
    card.free = 0  # what is kept needs no memory
    assert read_rate.device_read_rate() == first
    card.uuid = "34-cd"
    assert read_rate.device_read_rate() is None
    card.free = 100 << 30
    other = read_rate.device_read_rate()
    assert other is not None and other.bytes_per_s == 4.5e12


def test_a_rate_that_a_run_exceeded_is_measured_again(card) -> None:
    rate = read_rate.device_read_rate()
    way = SimpleNamespace(recording=SimpleNamespace(steps=[step(2.0)]))
    measured = SimpleNamespace(reads=READS, read_rate=rate, ways=[way])
    session._forget_low_rate(measured)
    assert read_rate.device_read_rate() == rate and card.count == 1
    measured.reads = replace(READS, target_weights=int(4e12 * 2.1e-3))
    session._forget_low_rate(measured)
    again = read_rate.device_read_rate()
    assert again is not None and again.bytes_per_s == 4.5e12 and card.count == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"bytes_per_s": "x"}', '{"bytes_per_s": -1, "measurement": ""}',
     '{"bytes_per_s": NaN, "measurement": ""}'],
)  # fmt: skip
def test_a_file_that_is_no_rate_is_measured_again(card, tmp_path, text: str) -> None:
    read_rate.device_read_rate()
    (kept,) = (tmp_path / "llmctl" / "read-rates").iterdir()
    kept.write_text(text)
    rate = read_rate.device_read_rate()
    assert rate is not None and rate.bytes_per_s == 4.5e12


def test_a_cache_that_cannot_be_written_costs_a_measurement(card, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    for wanted in (4e12, 4.5e12):
        rate = read_rate.device_read_rate()
        assert rate is not None and rate.bytes_per_s == wanted
    read_rate.forget_read_rate()


def test_a_gpu_without_kernels_has_no_rate(card) -> None:
    card.capability = (7, 0)
    assert read_rate.device_read_rate() is None and card.count == 0


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 8])
@pytest.mark.parametrize("pattern", read_rate.PATTERNS)
def test_every_pattern_reads_all_of_the_array_once(pattern: str, num_blocks: int) -> None:
    """In Triton's interpreter: numbers that are read twice cancel out."""
    tiles, tile = 7, read_rate.TILE
    bits = torch.iinfo(torch.int32)
    source = torch.randint(bits.min, bits.max, (tiles * tile,), dtype=torch.int32)
    out = torch.full((num_blocks, tile), 7, dtype=torch.int32)
    run_launches([read_rate.read_launch(pattern, source, out)])
    assert torch.equal(xor(out), xor(source.view(tiles, tile)))


def xor(rows: torch.Tensor) -> torch.Tensor:
    """The exclusive or of all rows."""
    return reduce(torch.bitwise_xor, rows)


@pytest.mark.parametrize("pattern", read_rate.PATTERNS)
def test_its_tiles_are_asked_for_ahead(pattern: str) -> None:
    """And a thread block needs no more shared memory than every GPU has."""
    ((_, binary, code),) = compile_all([read_rate.read_spec(pattern)])
    assert "LDGSTS" in code and binary.local_bytes == 0
    assert binary.shared_bytes <= min(arch.max_shared_bytes for arch in ARCHS.values())

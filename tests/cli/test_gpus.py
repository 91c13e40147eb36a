"""What is known of GPUs, and the model that predicts a decoding step from the bytes it reads."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from llmctl.cli.gpus import (
    FOUR_BIT_SHARES,
    GB,
    GPUS,
    READ_SHARE,
    STEP_SHARES,
    Gpu,
    default_gpu,
    describe_device,
    effective_read_bytes_s,
    find_gpu,
    step_share,
)
from llmctl.errors import BadConfig


def test_the_shares_are_those_of_the_measurements(repository: Path) -> None:
    text = (repository / "docs/performance/h200.md").read_text()
    read_tb_s = float(re.search(r"\| read \| TB/s \| ([\d.]+)", text)[1])
    assert read_tb_s * 1e12 / GPUS["h200"].read_bytes_s == pytest.approx(READ_SHARE, rel=0.01)
    measured = [*zip(("1b", "3b", "8b", "70b"), STEP_SHARES, strict=True)]
    for size, (read_bytes, share) in (*measured, ("8b-mxfp4", FOUR_BIT_SHARES[-1])):
        row = re.search(rf"\| decode-{size} \| ms/step \| ([\d.]+) .*?\| ([\d.]+)% \|", text)
        assert float(row[2]) / 100 == pytest.approx(share, rel=0.01)
        seconds_s = float(row[1]) / 1e3
        assert read_bytes == pytest.approx(seconds_s * read_tb_s * 1e12 * share, rel=0.01)


def test_the_documentation_names_the_same_shares(repository: Path) -> None:
    text = (repository / "docs/inspect.md").read_text()
    assert f"x {READ_SHARE:.3f} x share" in text
    row = next(line for line in text.splitlines() if line.startswith("| share |"))
    assert re.findall(r"([\d.]+) %", row) == [f"{100 * share:.1f}" for _, share in STEP_SHARES]
    row = next(line for line in text.splitlines() if line.startswith("| share of 4-bit weights |"))
    assert re.findall(r"([\d.]+) %", row) == [f"{100 * s:.1f}" for _, s in FOUR_BIT_SHARES]


def test_a_measured_step_is_predicted_as_it_was_measured(h200_rows: dict[str, float]) -> None:
    read_bytes, share = STEP_SHARES[-1]
    assert step_share(read_bytes) == share
    speed = effective_read_bytes_s(GPUS["h200"], read_bytes)
    assert 1e3 * read_bytes / speed == pytest.approx(h200_rows["decode-70b"], rel=0.01)


def test_the_share_grows_with_the_step_and_ends_where_measurements_end() -> None:
    sizes = [10.0**exponent for exponent in range(6, 13)]
    shares = [step_share(size) for size in sizes]
    assert shares == sorted(shares)
    for measured in (STEP_SHARES, FOUR_BIT_SHARES):  # with 4-bit weights 1B's was more than 3B's
        assert step_share(sizes[0], measured) == measured[0][1]
        assert step_share(sizes[-1], measured) == measured[-1][1]
        for (low, one), (high, other) in pairwise(measured):
            between = step_share((low * high) ** 0.5, measured)
            assert between == pytest.approx((one + other) / 2)


@pytest.mark.parametrize(
    "name, capability, known",
    [
        ("NVIDIA H200", "9.0", "h200"),
        ("NVIDIA H100 80GB HBM3", "9.0", "h100"),
        ("NVIDIA H100 PCIe", "9.0", "h100-pcie"),
        ("NVIDIA H100 NVL", "9.0", "h100-nvl"),
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx-4090"),
    ],
)
def test_a_device_is_found_by_its_driver_s_name(name, capability, known) -> None:
    found = describe_device(name, 123, capability)
    assert (found.name, found.memory_bytes) == (known, 123)
    assert found.read_bytes_s == GPUS[known].read_bytes_s


def test_a_device_that_is_not_in_the_table_has_no_bandwidth() -> None:
    found = describe_device("NVIDIA Whatever", 7 * GB, "9.0")
    assert found == Gpu("NVIDIA Whatever", "9.0", 7 * GB, None)
    assert effective_read_bytes_s(found, 1e9) is None


def test_names_may_be_written_with_spaces_and_capitals() -> None:
    assert find_gpu("RTX 4090") is GPUS["rtx-4090"]
    with pytest.raises(BadConfig, match="h200"):
        find_gpu("gtx")


def test_an_engine_is_judged_on_a_gpu_that_it_was_compiled_for() -> None:
    assert default_gpu(["9.0"]).name == "h200"
    assert default_gpu(["12.0", "8.9"]).compute_capability == "8.9"
    assert default_gpu([""]).name == "h200"

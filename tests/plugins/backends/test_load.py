"""Compiled threads that read a file through a device's copies: here functions of this test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.load_driver import FakeDriver

from llmctl.errors import CorruptEngine, DeviceFailure
from llmctl.plugins.backends.cuda import load
from llmctl.plugins.backends.cuda.load import FUNCTIONS, Reading

SIZE = 300_000


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(values.tobytes())
    return path, values


PIECES = [(0, 4), (4, 100_004), (100_010, 100_011), (150_000, 299_999)]


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(("threads", "ring"), [(1, 1), (2, 3), (16, 2)])
def test_every_piece_arrives_where_it_belongs(
    file, monkeypatch, chunk_bytes: int, on_device: bool, threads: int, ring: int
) -> None:
    path, values = file
    monkeypatch.setattr(load, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(load, "NUM_THREADS", threads)
    monkeypatch.setattr(load, "RING", ring)
    monkeypatch.setattr(load.os, "cpu_count", lambda: 64)
    memory = np.zeros(SIZE + 500, np.uint8)
    pieces = [(begin, end, memory.ctypes.data + begin + 250) for begin, end in PIECES]
    driver = FakeDriver() if on_device else None
    Reading(path, pieces, driver).wait()
    wanted = np.zeros_like(memory)
    for begin, end in PIECES:
        wanted[begin + 250 : end + 250] = values[begin:end]
    assert np.array_equal(memory, wanted)
    if driver is not None:
        assert not any(driver.live.values()) and driver.most <= chunk_bytes
        assert driver.contexts == [7] * threads


def test_nothing_is_read_where_there_is_nothing(file) -> None:
    assert Reading(file[0], [], FakeDriver()).wait() == 0


FAILING = [name for name in FUNCTIONS if "Free" not in name and "Destroy" not in name]


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("after", [0, 2])
def test_a_call_that_fails_ends_all_threads_and_frees_everything(
    file, monkeypatch, name: str, after: int
) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(load.os, "cpu_count", lambda: 3)
    memory = np.zeros(SIZE, np.uint8)
    driver = FakeDriver({name: 700}, after)
    with pytest.raises(DeviceFailure, match="loading weights: status 700"):
        Reading(file[0], [(0, SIZE, memory.ctypes.data)], driver).wait()
    assert not any(driver.live.values())


@pytest.mark.parametrize("on_device", [True, False])
def test_a_file_that_ends_early_is_named_with_the_byte(file, on_device: bool) -> None:
    memory = np.zeros(SIZE + 10, np.uint8)
    driver = FakeDriver() if on_device else None
    with pytest.raises(CorruptEngine, match=f"ends at byte {SIZE} while") as refused:
        Reading(file[0], [(0, SIZE + 10, memory.ctypes.data)], driver).wait()
    assert "build the engine again" in refused.value.fix


def test_an_error_of_the_system_is_its_own(file, tmp_path: Path) -> None:
    memory = np.zeros(SIZE, np.uint8)
    with pytest.raises(IsADirectoryError):
        Reading(tmp_path, [(0, SIZE, memory.ctypes.data)], None).wait()

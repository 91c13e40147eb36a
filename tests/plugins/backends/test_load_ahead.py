"""A file that is read into memory of its own before the device is used otherwise: a driver's
functions are this test's."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from support.load_driver import FakeDriver

from llmctl.errors import DeviceFailure
from llmctl.plugins.backends.cuda import load, load_ahead
from llmctl.plugins.backends.cuda.load import ReadingReport
from llmctl.plugins.backends.cuda.load_ahead import START_FUNCTIONS, ReadingAhead

SIZE = 100_000
PIECES = [(100, 50_100, 0), (60_000, 60_007, 50_176)]


@pytest.fixture
def values(tmp_path: Path) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    (tmp_path / "weights").write_bytes(values.tobytes())
    return values


def driver_of(monkeypatch: pytest.MonkeyPatch, *fails, **named) -> FakeDriver:
    driver = FakeDriver(*fails, **named)
    monkeypatch.setattr(load_ahead, "driver_library", lambda: driver)
    monkeypatch.setattr(load_ahead, "cuda_driver", lambda device: driver)
    return driver


def test_pieces_arrive_in_memory_of_their_own(tmp_path, values, monkeypatch) -> None:
    driver = driver_of(monkeypatch)
    monkeypatch.setattr(load, "CHUNK_BYTES", 1000)
    reading = ReadingAhead(tmp_path / "weights", PIECES, 50_200)
    assert reading.held_bytes == 50_200 and driver.contexts[0] == 7
    memory = reading.take_memory()
    assert reading.wait() > 0 and reading.num_bytes == 50_007
    interface = memory.__cuda_array_interface__
    assert interface["shape"] == (50_200,) and interface["typestr"] == "|u1"
    found = np.frombuffer((ctypes.c_ubyte * 50_200).from_address(interface["data"][0]), np.uint8)
    assert np.array_equal(found[:50_000], values[100:50_100])
    assert np.array_equal(found[50_176:50_183], values[60_000:60_007])
    assert reading.held_bytes == 0, "it is the taker's"
    del reading
    gc.collect()
    assert len(driver.live["memory"]) == 1
    del memory
    gc.collect()
    assert not any(driver.live.values())


def test_memory_that_nobody_takes_is_freed_and_reading_stops(tmp_path, values, monkeypatch) -> None:
    driver = driver_of(monkeypatch)
    monkeypatch.setattr(load, "CHUNK_BYTES", 10)
    began = threading.Event()
    copy, copied = driver.do_cuMemcpyHtoDAsync_v2, []
    report = ReadingReport()
    monkeypatch.setattr(load_ahead, "ReadingReport", lambda: report)

    def slow(target, source, size, stream) -> None:
        began.set()
        until = monotonic() + 20
        while not copied and not report.is_stopped and monotonic() < until:
            sleep(0.001)  # as long as whoever drops it takes
        copied.append(size)
        copy(target, source, size, stream)

    driver.do_cuMemcpyHtoDAsync_v2 = slow
    reading = ReadingAhead(tmp_path / "weights", [(0, SIZE, 0)], SIZE)
    assert began.wait(20)
    del reading
    gc.collect()
    assert not any(driver.live.values()) and sum(copied) < SIZE


def test_without_weights_the_context_alone_is_made(tmp_path, values, monkeypatch) -> None:
    driver = driver_of(monkeypatch)
    reading = ReadingAhead(tmp_path / "weights", [], 0)
    assert reading.wait() == 0 and reading.held_bytes == 0
    assert driver.contexts == [7] and not any(driver.live.values())


@pytest.mark.parametrize("name", START_FUNCTIONS)
def test_what_fails_at_the_start_holds_nothing(tmp_path, values, monkeypatch, name: str) -> None:
    driver = driver_of(monkeypatch, {name: 2})
    reading = ReadingAhead(tmp_path / "weights", PIECES, 50_200)
    assert reading.held_bytes == 0
    with pytest.raises(DeviceFailure, match="status 2"):
        reading.wait()
    assert not any(driver.live.values())


def test_importing_it_needs_no_torch() -> None:
    check = "import sys, llmctl.runtime.engines.weights_ahead; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)

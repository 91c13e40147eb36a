"""Weights that are read before torch is there: where they go, and who may take them."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hostile_engine import build_tiny
from support.load_driver import FakeDriver

from llmctl.builder.engine_format import (
    CONFIG_FILE,
    engine_file,
    open_engine,
    weight_sizes,
)
from llmctl.plugins.backends.cuda import load_ahead
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines import weights_ahead
from llmctl.runtime.engines.loading import Loading
from llmctl.runtime.engines.weight_places import allocated_bytes
from llmctl.runtime.engines.weights_ahead import WeightsAhead


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(load_ahead, "driver_library", lambda: driver)
    return driver


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("ahead"), "fp8")


class OnHost:
    """The reading's memory as torch takes it on a CPU, and its owner."""

    def __init__(self, memory: load_ahead.DeviceMemory) -> None:
        self.memory = memory
        (size,) = memory.__cuda_array_interface__["shape"]
        at, _ = memory.__cuda_array_interface__["data"]
        self.__array_interface__ = np.ctypeslib.as_array(
            (ctypes.c_ubyte * size).from_address(at)
        ).__array_interface__


def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    take = WeightsAhead.take_memory

    def taken(self: WeightsAhead, path: Path, num_bytes: int) -> torch.Tensor | None:
        memory = take(self, path, num_bytes)
        return None if memory is None else torch.from_numpy(np.asarray(OnHost(memory)))

    monkeypatch.setattr(WeightsAhead, "take_memory", taken)


def test_weights_are_those_of_the_file_and_are_read_once(
    engine: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch)
    plan, stored = open_engine(engine)
    ahead = WeightsAhead.begin(engine)
    assert ahead is not None and ahead.held_bytes == allocated_bytes(plan)
    made: list[object] = []
    monkeypatch.setattr("llmctl.runtime.engines.loading.Reading", lambda *its: made.append(its))
    loading = Loading(engine / engine_file(0), plan, stored, DeviceQueue("cpu"), ahead)
    report = loading.finish()
    assert not made and ahead.held_bytes == 0
    for name, weight in loading.weights.items():
        if name in stored:
            assert torch.equal(weight.view(torch.uint8), stored[name].view(torch.uint8)), name
    names = [name for name in weight_sizes(plan) if name in stored]
    assert report.num_bytes == sum(stored[name].nbytes for name in names) > 0


def test_a_second_opening_reads_for_itself(
    engine: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host(monkeypatch)
    plan, stored = open_engine(engine)
    ahead = WeightsAhead.begin(engine)
    openings = [
        Loading(engine / engine_file(0), plan, stored, DeviceQueue("cpu"), ahead) for _ in range(2)
    ]
    for loading in openings:
        loading.finish()
    first, second = (loading.weights for loading in openings)
    for name in stored.keys() & first.keys():
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name
        assert first[name].data_ptr() != second[name].data_ptr()


def test_a_file_that_was_replaced_is_not_taken_for_what_is_read(
    engine: Path, driver: FakeDriver, tmp_path: Path
) -> None:
    ahead = WeightsAhead.begin(engine)
    assert ahead is not None
    other = tmp_path / engine_file(0)
    other.write_bytes((engine / engine_file(0)).read_bytes())
    num_bytes = ahead.held_bytes
    assert ahead.take_memory(other, num_bytes) is None
    assert ahead.take_memory(engine / engine_file(0), num_bytes + 256) is None
    del ahead
    gc.collect()
    assert not any(driver.live.values())


def test_an_engine_that_makes_its_weights_gets_a_context_alone(
    engine: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = open_engine(engine)
    monkeypatch.setattr(weights_ahead, "read_ranges", lambda folder: (plan, {}))
    ahead = WeightsAhead.begin(engine)
    assert ahead is not None and ahead.reading.wait() == 0 == ahead.held_bytes
    assert driver.contexts == [7] and not any(driver.live.values())


def test_what_cannot_begin_is_left_to_whoever_opens_the_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(load_ahead, "driver_library", none)
    assert WeightsAhead.begin(engine) is None
    (tmp_path / CONFIG_FILE).write_text((engine / CONFIG_FILE).read_text())
    assert WeightsAhead.begin(tmp_path) is None

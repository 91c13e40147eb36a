"""Compiled threads that read a file through a device's copies: here functions of this test."""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest

from llmctl.errors import CorruptEngine, DeviceFailure
from llmctl.plugins.backends.cuda import load
from llmctl.plugins.backends.cuda.load import FUNCTIONS, read_file

SIZE = 300_000


class FakeDriver:
    """What `read_file` asks of a driver. Copies happen when the stream or an event is waited for,
    so a buffer that is written too early is noticed; `fails`: function -> status of a call of it.
    """

    context = 7

    def __init__(self, fails: dict[str, int] | None = None, after: int = 0) -> None:
        self.fails, self.after = fails or {}, after
        self.lock = threading.Lock()
        self.live: dict[str, set[int]] = {"buffers": set(), "streams": set(), "events": set()}
        self.memory: list[ctypes.Array[ctypes.c_char]] = []
        self.pending: dict[int, list[tuple[int, int, int]]] = {}  # by stream
        self.marks: dict[int, tuple[int, int]] = {}  # event -> stream, copies before it
        self.done: dict[int, int] = {}  # copies made, by stream
        self.contexts: list[int] = []
        self.most = 0  # bytes of a copy
        out = ctypes.POINTER(c_void_p)
        types = {
            "cuCtxSetCurrent": [c_void_p],
            "cuMemHostAlloc": [out, c_size_t, c_uint],
            "cuMemFreeHost": [c_void_p],
            "cuStreamCreate": [out, c_uint],
            "cuStreamSynchronize": [c_void_p],
            "cuStreamDestroy_v2": [c_void_p],
            "cuEventCreate": [out, c_uint],
            "cuEventRecord": [c_void_p, c_void_p],
            "cuEventSynchronize": [c_void_p],
            "cuEventDestroy_v2": [c_void_p],
            "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
        }
        self.functions = {
            name: CFUNCTYPE(c_int, *types[name])(self._locked(name)) for name in FUNCTIONS
        }

    def address_of(self, function: str) -> int:
        found = ctypes.cast(self.functions[function], c_void_p).value
        assert found is not None
        return found

    def check(self, status: int, doing: str) -> None:
        raise DeviceFailure(f"{doing}: status {status}")

    def _locked(self, name: str):
        method = getattr(self, name)

        def call(*arguments) -> int:
            with self.lock:
                self.after -= name in self.fails
                if name in self.fails and self.after < 0:
                    return self.fails[name]
                method(*arguments)
                return 0

        return call

    def cuCtxSetCurrent(self, context) -> None:
        self.contexts.append(context)

    def cuMemHostAlloc(self, out, size, flags) -> None:
        buffer = ctypes.create_string_buffer(size)
        self.memory.append(buffer)
        out[0] = ctypes.addressof(buffer)
        self.live["buffers"].add(ctypes.addressof(buffer))

    def cuMemFreeHost(self, buffer) -> None:
        self.live["buffers"].remove(buffer)

    def _make(self, kind: str, out) -> None:
        self.memory.append(ctypes.create_string_buffer(1))
        out[0] = ctypes.addressof(self.memory[-1])
        self.live[kind].add(out[0])

    def cuStreamCreate(self, out, flags) -> None:
        assert flags == 1
        self._make("streams", out)
        self.pending[out[0]], self.done[out[0]] = [], 0

    def cuStreamDestroy_v2(self, stream) -> None:
        is_lost = "cuStreamSynchronize" in self.fails
        assert is_lost or self.done[stream] == len(self.pending[stream])
        self.live["streams"].remove(stream)

    def cuEventCreate(self, out, flags) -> None:
        assert flags == 2
        self._make("events", out)

    def cuEventDestroy_v2(self, event) -> None:
        self.live["events"].remove(event)

    def cuEventRecord(self, event, stream) -> None:
        self.marks[event] = stream, len(self.pending[stream])

    def cuMemcpyHtoDAsync_v2(self, target, source, size, stream) -> None:
        self.most = max(self.most, size)
        self.pending[stream].append((target, source, size))

    def _run(self, stream, until: int) -> None:
        for target, source, size in self.pending[stream][self.done[stream] : until]:
            ctypes.memmove(target, source, size)
        self.done[stream] = max(self.done[stream], until)

    def cuEventSynchronize(self, event) -> None:
        if event in self.marks:
            self._run(*self.marks[event])

    def cuStreamSynchronize(self, stream) -> None:
        self._run(stream, len(self.pending[stream]))


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
    read_file(path, pieces, driver)
    wanted = np.zeros_like(memory)
    for begin, end in PIECES:
        wanted[begin + 250 : end + 250] = values[begin:end]
    assert np.array_equal(memory, wanted)
    if driver is not None:
        assert not any(driver.live.values()) and driver.most <= chunk_bytes
        assert driver.contexts == [7] * threads


def test_nothing_is_read_where_there_is_nothing(file) -> None:
    read_file(file[0], [], FakeDriver())


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
        read_file(file[0], [(0, SIZE, memory.ctypes.data)], driver)
    assert not any(driver.live.values())


@pytest.mark.parametrize("on_device", [True, False])
def test_a_file_that_ends_early_is_named_with_the_byte(file, on_device: bool) -> None:
    memory = np.zeros(SIZE + 10, np.uint8)
    driver = FakeDriver() if on_device else None
    with pytest.raises(CorruptEngine, match=f"ends at byte {SIZE} while") as refused:
        read_file(file[0], [(0, SIZE + 10, memory.ctypes.data)], driver)
    assert "build the engine again" in refused.value.fix


def test_an_error_of_the_system_is_its_own(file, tmp_path: Path) -> None:
    memory = np.zeros(SIZE, np.uint8)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, [(0, SIZE, memory.ctypes.data)], None)

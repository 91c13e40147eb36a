"""A CUDA driver as far as reading a file through it goes: functions that compiled threads call."""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint, c_uint64, c_void_p

from llmctl.errors import DeviceFailure
from llmctl.plugins.backends.cuda.load import FUNCTIONS
from llmctl.plugins.backends.cuda.load_ahead import START_FUNCTIONS


class FakeDriver:
    """What `Reading` asks of a driver. Copies happen when the stream or an event is waited for,
    so a buffer that is written too early is noticed; `fails`: function -> status of a call of it.
    """

    context = 7

    def __init__(self, fails: dict[str, int] | None = None, after: int = 0) -> None:
        self.fails, self.after = fails or {}, after
        self.lock = threading.Lock()
        self.live: dict[str, set[int]] = {
            "buffers": set(),
            "streams": set(),
            "events": set(),
            "memory": set(),
        }
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
            "cuInit": [c_uint],
            "cuDeviceGet": [ctypes.POINTER(c_int), c_int],
            "cuDevicePrimaryCtxRetain": [out, c_int],
            "cuMemAlloc_v2": [ctypes.POINTER(c_uint64), c_size_t],
            "cuMemFree_v2": [c_uint64],
        }
        assert {*FUNCTIONS, *START_FUNCTIONS} <= set(types)
        self.functions = {
            name: CFUNCTYPE(c_int, *its)(self._locked(name)) for name, its in types.items()
        }

    def address_of(self, function: str) -> int:
        found = ctypes.cast(self.functions[function], c_void_p).value
        assert found is not None
        return found

    def __getattr__(self, function: str):
        """As a library has its functions."""
        return self.functions[function]

    def check(self, status: int, doing: str) -> None:
        raise DeviceFailure(f"{doing}: status {status}")

    def _locked(self, name: str):
        def call(*arguments) -> int:
            with self.lock:
                self.after -= name in self.fails
                if name in self.fails and self.after < 0:
                    return self.fails[name]
                getattr(self, f"do_{name}")(*arguments)
                return 0

        return call

    def do_cuCtxSetCurrent(self, context) -> None:
        self.contexts.append(context)

    def do_cuMemHostAlloc(self, out, size, flags) -> None:
        buffer = ctypes.create_string_buffer(size)
        self.memory.append(buffer)
        out[0] = ctypes.addressof(buffer)
        self.live["buffers"].add(ctypes.addressof(buffer))

    def do_cuMemFreeHost(self, buffer) -> None:
        self.live["buffers"].remove(buffer)

    def _make(self, kind: str, out) -> None:
        self.memory.append(ctypes.create_string_buffer(1))
        out[0] = ctypes.addressof(self.memory[-1])
        self.live[kind].add(out[0])

    def do_cuStreamCreate(self, out, flags) -> None:
        assert flags == 1
        self._make("streams", out)
        self.pending[out[0]], self.done[out[0]] = [], 0

    def do_cuStreamDestroy_v2(self, stream) -> None:
        is_lost = "cuStreamSynchronize" in self.fails
        assert is_lost or self.done[stream] == len(self.pending[stream])
        self.live["streams"].remove(stream)

    def do_cuEventCreate(self, out, flags) -> None:
        assert flags == 2
        self._make("events", out)

    def do_cuEventDestroy_v2(self, event) -> None:
        self.live["events"].remove(event)

    def do_cuEventRecord(self, event, stream) -> None:
        self.marks[event] = stream, len(self.pending[stream])

    def do_cuMemcpyHtoDAsync_v2(self, target, source, size, stream) -> None:
        self.most = max(self.most, size)
        self.pending[stream].append((target, source, size))

    def _run(self, stream, until: int) -> None:
        for target, source, size in self.pending[stream][self.done[stream] : until]:
            ctypes.memmove(target, source, size)
        self.done[stream] = max(self.done[stream], until)

    def do_cuEventSynchronize(self, event) -> None:
        if event in self.marks:
            self._run(*self.marks[event])

    def do_cuStreamSynchronize(self, stream) -> None:
        self._run(stream, len(self.pending[stream]))

    def do_cuInit(self, flags) -> None:
        pass

    def do_cuDeviceGet(self, out, device) -> None:
        out[0] = device + 3

    def do_cuDevicePrimaryCtxRetain(self, out, handle) -> None:
        out[0] = handle + 4

    def do_cuMemAlloc_v2(self, out, size) -> None:
        self.memory.append(ctypes.create_string_buffer(size))
        out[0] = ctypes.addressof(self.memory[-1])
        self.live["memory"].add(out[0])

    def do_cuMemFree_v2(self, address) -> None:
        self.live["memory"].remove(address)

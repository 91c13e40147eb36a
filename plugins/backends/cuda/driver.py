"""The CUDA driver through ctypes: modules, launches, tensor maps, copies and events.

Importing needs no GPU; the first use does. The context is the one torch uses (the device's primary
context). Structures and constants are those of CUDA 12's and 13's cuda.h.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from llmctl.errors import DeviceFailure, NoDevice, OutOfMemory
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.dtypes import pointer
from llmctl.plugins.backends.cuda.kernel_spec import TensorMap
from llmctl.plugins.backends.cuda.launch import (
    MAP_ALIGNMENT,
    LoadedKernel,
    PackedLaunch,
    TensorMapBits,
    in_one_piece,
    launch_config,
)

if TYPE_CHECKING:
    import torch

Argument: TypeAlias = "torch.Tensor | TensorMap | int | float"

_OUT_OF_MEMORY, _NO_DEVICE = 2, 100
_MAX_DYNAMIC_SHARED, _SHARED_PERCENT, _NON_PORTABLE_CLUSTER = 8, 9, 14  # CUfunction_attribute
_PORTABLE_CLUSTER = 8  # thread blocks; larger clusters must be requested
_EVENT_DISABLE_TIMING = 2
_ENABLE_PEER_ACCESS = 1  # CUipcMem_flags
_MAP_TYPES = {"float8_e4m3fn": 0, "uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_MAP_SWIZZLES = {0: 0, 128: 3}
_MAP_L2_PROMOTION_256B = 3
_SCALARS: dict[str, Any] = {"i32": c_int32, "i64": c_int64, "fp32": c_float}


class IpcHandle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 64)]


class CudaDriver:
    """The driver, with the primary context of one device."""

    def __init__(self, device: int = 0) -> None:
        """NoDevice where there is no driver or no such GPU."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoDevice(
                f"the CUDA driver cannot be loaded: {error}",
                fix="run on a machine with an NVIDIA driver, or use --backend cpu",
            ) from error
        self._launch = self._library.cuLaunchKernelEx
        self._launch.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
        self._thread = threading.local()
        self._context = c_void_p()
        handle = c_int32()
        self._call("cuInit", c_uint32(0))
        self._call("cuDeviceGet", byref(handle), c_int32(device))
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), handle)
        self.make_current()

    def make_current(self) -> None:
        """Let this thread use the device; the driver keeps a context per thread."""
        if not getattr(self._thread, "is_ready", False):
            self._call("cuCtxSetCurrent", self._context)
            self._thread.is_ready = True

    def load(self, kernel: CompiledKernel) -> LoadedKernel:
        """Load a cubin; its code stays on the device until the process ends."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), kernel.cubin, what=kernel.name)
        self._call("cuModuleGetFunction", byref(function), module, kernel.entry.encode())
        if kernel.shared_bytes > 48 * 1024:  # what a kernel may use without a request
            self._set(function, _MAX_DYNAMIC_SHARED, kernel.shared_bytes, kernel.name)
        # A small kernel alone on a multiprocessor would give it little shared memory until it ends;
        # blocks of the next product, which fill their rings meanwhile, could not start there.
        self._set(function, _SHARED_PERCENT, 100, kernel.name)
        if kernel.cluster > _PORTABLE_CLUSTER:
            self._set(function, _NON_PORTABLE_CLUSTER, 1, kernel.name)
        return LoadedKernel(kernel, function)

    def prepare(
        self,
        loaded: LoadedKernel,
        grid: Sequence[int],
        arguments: Sequence[Argument],
        use_pdl: bool,
    ) -> PackedLaunch:
        """A launch with packed arguments; calling it with a stream enqueues the kernel.

        The tensors must outlive it.
        """
        kernel = loaded.kernel
        packed = [
            self._pack(kernel, kind, value)
            for kind, value in zip(kernel.arguments, arguments, strict=True)
        ]
        packed += [c_uint64(0)] * kernel.num_hidden_arguments
        config = launch_config(kernel, grid, use_pdl)
        return PackedLaunch(self, loaded, config, *in_one_piece(packed))

    def rebind(self, launch: PackedLaunch, tensors: Mapping[int, torch.Tensor]) -> PackedLaunch:
        """The same launch with these tensors, of the same types, for the arguments of the given
        numbers. They must outlive it."""
        return launch.with_pointers({at: tensor.data_ptr() for at, tensor in tensors.items()})

    def encode(self, tensor_map: TensorMap) -> ctypes.Structure:
        """The driver's 128 bytes for a 2-D tensor map."""
        tensor = tensor_map.tensor
        assert tensor.dim() == 2 and tensor.is_contiguous()
        rows, columns = tensor.shape
        room = (c_uint64 * 24)()
        aligned = TensorMapBits.from_buffer(room, -ctypes.addressof(room) % MAP_ALIGNMENT)
        self._call(
            "cuTensorMapEncodeTiled",
            byref(aligned),
            c_uint32(_MAP_TYPES[str(tensor.dtype).removeprefix("torch.")]),
            c_uint32(2),
            c_void_p(tensor.data_ptr()),
            (c_uint64 * 2)(columns, rows),
            (c_uint64 * 1)(columns * tensor.element_size()),
            (c_uint32 * 2)(tensor_map.box_columns, tensor_map.box_rows),
            (c_uint32 * 2)(1, 1),
            c_uint32(0),  # no interleaving
            c_uint32(_MAP_SWIZZLES[tensor_map.swizzle]),
            c_uint32(_MAP_L2_PROMOTION_256B),
            c_uint32(0),  # zeros outside
            what=f"a {list(tensor.shape)} {tensor.dtype} tensor in boxes of "
            f"[{tensor_map.box_rows}, {tensor_map.box_columns}]",
        )
        return aligned

    @property
    def context(self) -> int:
        """The device's primary context."""
        return int(self._context.value or 0)

    def address_of(self, function: str) -> int:
        """Where a function of the driver is, for compiled code that calls it."""
        return int(ctypes.cast(getattr(self._library, function), c_void_p).value or 0)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from pinned host memory."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            *(c_void_p(target), c_void_p(source), ctypes.c_size_t(num_bytes), c_void_p(stream)),
        )

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed device memory, which stays until the process ends. Apart from
        torch's, so that other processes can map it."""
        address = c_uint64()
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemAlloc_v2", byref(address), size, what=f"{num_bytes} bytes")
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
        self._call("cuCtxSynchronize")
        return address.value

    def handle_of(self, address: int) -> bytes:
        """What other processes of this machine open memory of `allocate` by."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.data)

    def open_handle(self, handle: bytes) -> int:
        """The address here of another process's memory, perhaps on another device."""
        address = c_uint64()
        given = IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, c_uint32(_ENABLE_PEER_ACCESS))
        return address.value

    def make_event(self) -> Event:
        """An event that counts as passed until it is first recorded."""
        handle = c_void_p()
        self._call("cuEventCreate", byref(handle), c_uint32(_EVENT_DISABLE_TIMING))
        return Event(self, handle)

    def launch(self, config: object, function: c_void_p, pointers: object, name: str) -> None:
        """cuLaunchKernelEx, with the kernel's name in what it may raise."""
        status = self._launch(config, function, pointers, None)
        if status:
            self.check(status, f"launching {name}")

    def _pack(self, kernel: CompiledKernel, kind: str, value: Argument) -> Any:
        """One argument as the kernel reads it."""
        if kind == "tensor_map":
            assert isinstance(value, TensorMap), kernel.name
            return self.encode(value)
        if kind in ("i32", "i64", "fp32"):
            bits = {"i32": 31, "i64": 63}.get(kind, 0)
            assert isinstance(value, int | float), f"{kernel.name}: {value!r} for {kind}"
            assert not bits or -(1 << bits) <= value < 1 << bits, f"{kernel.name}: {value} is wide"
            return _SCALARS[kind](value)
        assert not isinstance(value, int | float | TensorMap), f"{kernel.name}: {value} for {kind}"
        assert kind == pointer(value.dtype), f"{kernel.name}: {value.dtype} for {kind}"
        address = value.data_ptr()
        assert address % 16 == 0, f"{kernel.name}: a pointer is not 16-byte aligned"
        return c_uint64(address)

    def _set(self, function: c_void_p, attribute: int, value: int, name: str) -> None:
        self._call("cuFuncSetAttribute", function, c_uint32(attribute), c_int32(value), what=name)

    def _call(self, function: str, *arguments: object, what: str = "") -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            self.check(status, f"{function} for {what}" if what else function)

    def check(self, status: int, doing: str) -> None:
        """Raise what a status means: NoDevice, OutOfMemory or DeviceFailure."""
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(status, byref(name))
        self._library.cuGetErrorString(status, byref(text))
        error = (name.value or b"?").decode() + ": " + (text.value or b"?").decode()
        message = f"{doing}: {error}"
        if status == _NO_DEVICE:
            raise NoDevice(message, fix="run on a machine with an NVIDIA GPU, or use --backend cpu")
        if status == _OUT_OF_MEMORY:
            raise OutOfMemory(message, fix="lower --kv-cache-free-gpu-memory-fraction")
        raise DeviceFailure(
            message, fix="start again; after a failed kernel a process can use the device no more"
        )


class Event:
    """A point in a stream that the host can wait for."""

    __slots__ = ("_driver", "_handle")

    def __init__(self, driver: CudaDriver, handle: c_void_p) -> None:
        self._driver = driver
        self._handle = handle

    def record(self, stream: int) -> None:
        """Mark everything enqueued so far."""
        self._driver._call("cuEventRecord", self._handle, c_void_p(stream))

    def wait(self) -> None:
        """Block the host until what was marked is done."""
        self._driver._call("cuEventSynchronize", self._handle)


@cache
def cuda_driver(device: int = 0) -> CudaDriver:
    """The driver of one device, made once."""
    return CudaDriver(device)

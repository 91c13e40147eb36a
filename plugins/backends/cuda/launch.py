"""Launches in the form of the CUDA driver: a configuration, and the address of each argument.

Thousands of them are kept, so each consists of few objects, because garbage collections visit all
of them. Structures and constants are those of CUDA 12's and 13's cuda.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.compiler import CompiledKernel
    from llmctl.plugins.backends.cuda.driver import CudaDriver

MAP_ALIGNMENT = 64  # bytes, required by the driver for tensor maps; ctypes guarantees 8
_POINTER_ALIGNMENT = 16  # bytes, required by kernels for what they read
_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_uint32), ("padding", c_uint32), ("value", c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", c_uint32),
    ]


class TensorMapBits(ctypes.Structure):
    _fields_ = [("words", c_uint64 * 16)]


class LoadedKernel:
    """A kernel on the device."""

    __slots__ = ("function", "kernel")

    def __init__(self, kernel: CompiledKernel, function: c_void_p) -> None:
        self.kernel = kernel
        self.function = function


class PackedLaunch:
    """A packed launch; calling it with a stream enqueues the kernel. It owns everything its
    pointers refer to except the tensors."""

    __slots__ = ("_addresses", "_config", "_driver", "_loaded", "_pointers", "_reference", "_room")

    def __init__(
        self,
        driver: CudaDriver,
        loaded: LoadedKernel,
        config: LaunchConfig,
        room: Any,
        addresses: Sequence[int],
    ) -> None:
        """room: a ctypes array that holds the arguments, at `addresses`."""
        self._driver = driver
        self._loaded = loaded
        self._config = config
        self._reference = byref(config)
        self._room = room
        self._addresses = addresses
        self._pointers = (c_void_p * len(addresses))(*addresses)

    def __call__(self, stream: int) -> None:
        self._config.stream = stream
        loaded = self._loaded
        self._driver.launch(self._reference, loaded.function, self._pointers, loaded.kernel.name)

    def with_pointers(self, values: Mapping[int, int]) -> PackedLaunch:
        """The same launch with other values for some pointer arguments, by number: a copy of the
        arguments, which takes a fraction of the time of describing and checking each of them."""
        kinds = self._loaded.kernel.arguments
        assert all(kinds[at][0] == "*" for at in values), "only pointers are rebound"
        assert not any(value % _POINTER_ALIGNMENT for value in values.values()), "not aligned"
        room = type(self._room)()
        shift = _first(room) - _first(self._room)
        ctypes.memmove(_first(room), _first(self._room), ctypes.sizeof(room) - MAP_ALIGNMENT)
        addresses = [address + shift for address in self._addresses]
        for at, value in values.items():
            c_uint64.from_address(addresses[at]).value = value
        return PackedLaunch(self._driver, self._loaded, self._config, room, addresses)


def in_one_piece(packed: Sequence[Any]) -> tuple[Any, list[int]]:
    """Copies of the arguments in one object, and the address of each."""
    starts, size = [], 0
    for value in packed:
        alignment = MAP_ALIGNMENT if isinstance(value, TensorMapBits) else 8
        starts.append(-(-size // alignment) * alignment)
        size = starts[-1] + ctypes.sizeof(value)
    room = (c_uint64 * ((size + MAP_ALIGNMENT) // 8 + 1))()
    addresses = [_first(room) + start for start in starts]
    for address, value in zip(addresses, packed, strict=True):
        ctypes.memmove(address, byref(value), ctypes.sizeof(value))
    return room, addresses


def _first(room: Any) -> int:
    """The first address in an array that suits every argument."""
    return -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT


def launch_config(kernel: CompiledKernel, grid: Sequence[int], use_pdl: bool) -> LaunchConfig:
    """How a kernel is launched, but for the stream."""
    attributes = (LaunchAttribute * 2)()
    count = 0
    if use_pdl:
        attributes[count] = _attribute(_PROGRAMMATIC_SERIALIZATION, 1)
        count += 1
    if kernel.cluster > 1:
        attributes[count] = _attribute(_CLUSTER_DIMENSION, kernel.cluster, 1, 1)
        count += 1
    return LaunchConfig(
        (c_uint32 * 3)(*grid),
        (c_uint32 * 3)(kernel.threads, 1, 1),
        kernel.shared_bytes,
        None,
        attributes,
        count,
    )


def _attribute(identifier: int, *values: int) -> LaunchAttribute:
    attribute = LaunchAttribute(id=identifier)
    attribute.value[: len(values)] = values
    return attribute

"""The driver binding where there is no GPU: named errors, and arguments checked when packed."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from support.cuda_samples.specs import ADD_ROWS, COPY_BOX

from llmctl.errors import DeviceFailure, NoDevice, OutOfMemory
from llmctl.plugins.backends.cuda import driver as driver_module
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.driver import CudaDriver, LoadedKernel
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, TensorMap


class Library:
    """A libcuda whose calls succeed, or return the status set for them; launches are decoded."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.launches: list[dict[str, object]] = []
        self.kinds: list[object] = []  # ctypes of the arguments of the next launch

    def __getattr__(self, name: str) -> object:
        return Function(self, name)


class Function:
    def __init__(self, driver: Library, name: str) -> None:
        self.driver, self.name = driver, name

    def __call__(self, *arguments: object) -> int:
        if self.name in ("cuGetErrorName", "cuGetErrorString"):
            arguments[1]._obj.value = f"{self.name} {arguments[0]}".encode()
            return 0
        self.driver.calls.append((self.name, arguments))
        if self.name == "cuTensorMapEncodeTiled":
            arguments[0]._obj.words[:] = range(1, 17)
        if self.name == "cuLaunchKernelEx":
            self.driver.launches.append(self.decode(*arguments))
        return self.driver.statuses.get(self.name, 0)

    def decode(self, config, function, pointers, extra) -> dict[str, object]:
        found = config._obj
        attributes = [found.attributes[i] for i in range(found.num_attributes)]
        return {
            "grid": list(found.grid),
            "block": list(found.block),
            "shared": found.shared_bytes,
            "stream": found.stream,
            "attributes": [(a.id, list(a.value)[:3]) for a in attributes],
            "addresses": list(pointers),
            "arguments": [
                kind.from_address(address).value
                for kind, address in zip(self.driver.kinds, pointers, strict=True)
            ],
        }


@pytest.fixture
def library(monkeypatch) -> Library:
    found = Library()
    monkeypatch.setattr(driver_module.ctypes, "CDLL", lambda name: found)
    return found


def loaded(spec: KernelSpec, hidden: int = 0, cluster: int = 1) -> LoadedKernel:
    kernel = CompiledKernel(
        spec.name, spec.entry, b"", 128, 1024, spec.arguments, cluster, hidden, 16, 0
    )
    return LoadedKernel(kernel, ctypes.c_void_p(1))


def test_a_launch_passes_its_arguments_in_order_with_hidden_ones_as_null(library):
    x, out = torch.zeros(4, 256), torch.zeros(4, 256)
    library.kinds = [ctypes.c_uint64] * 2 + [ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
    library.kinds += [ctypes.c_uint64] * 2
    launch = CudaDriver().prepare(loaded(ADD_ROWS, 2), (4, 2, 1), (x, out, 4, -(2**40), 0.5), True)
    launch(55)
    launch(56)
    first, second = library.launches
    assert first["grid"] == [4, 2, 1] and first["block"] == [128, 1, 1]
    assert first["shared"] == 1024 and (first["stream"], second["stream"]) == (55, 56)
    assert first["attributes"] == [(6, [1, 0, 0])]  # programmatic stream serialization
    assert first["arguments"] == [x.data_ptr(), out.data_ptr(), 4, -(2**40), 0.5, 0, 0]


def test_clusters_and_programmatic_launches_are_attributes(library):
    library.kinds = [ctypes.c_uint64]
    spec = KernelSpec("ranks", "x.cu", ("*i32",), entry="f")
    out = torch.zeros(4, dtype=torch.int32)
    driver = CudaDriver()
    driver.prepare(loaded(spec, cluster=4), (8, 1, 1), (out,), False)(1)
    driver.prepare(loaded(spec, cluster=4), (8, 1, 1), (out,), True)(1)
    assert [launch["attributes"] for launch in library.launches] == [
        [(4, [4, 1, 1])],
        [(6, [1, 0, 0]), (4, [4, 1, 1])],
    ]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(8).half(), "torch.float16 for"),
        (0, torch.zeros(9)[1:], "16-byte aligned"),
        (0, 7, "7 for"),
        (2, 2**31, "2147483648 is wide"),
        (2, torch.zeros(1), "for i32"),
    ],
)
def test_an_argument_that_the_kernel_would_misread_is_caught(library, position, value, message):
    arguments = [torch.zeros(8), torch.zeros(8), 1, 1, 1.0]
    arguments[position] = value
    with pytest.raises(AssertionError, match=message):
        CudaDriver().prepare(loaded(ADD_ROWS), (1, 1, 1), arguments, True)


def test_a_tensor_map_is_encoded_at_an_aligned_address(library):
    source = torch.zeros(29, 128, dtype=torch.float8_e4m3fn)
    out = torch.zeros(1024, dtype=torch.uint8)
    arguments = (TensorMap(source, 8, 128, 128), out, 24)
    library.kinds = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32]
    prepared = CudaDriver().prepare(loaded(COPY_BOX), (1, 1, 1), arguments, True)
    prepared(1)  # kept: it owns what is read below
    (call,) = [found for name, found in library.calls if name == "cuTensorMapEncodeTiled"]
    assert ctypes.addressof(call[0]._obj) % 64 == 0
    assert call[1].value == 0 and call[3].value == source.data_ptr()  # FP8 travels as bytes
    assert [list(array) for array in call[4:8]] == [[128, 29], [128], [128, 8], [1, 1]]
    assert call[9].value == 3  # 128-byte swizzle
    (launch,) = library.launches
    address = launch["addresses"][0]
    assert address % 64 == 0
    assert list((ctypes.c_uint64 * 16).from_address(address)) == list(range(1, 17))
    assert launch["arguments"][1:] == [out.data_ptr(), 24]


def test_a_rebound_launch_differs_in_the_named_pointers_alone(library):
    x, y, out, other = (torch.zeros(4, 256) for _ in range(4))
    source = torch.zeros(29, 128, dtype=torch.float8_e4m3fn)
    spec = KernelSpec("f", "x.cu", ("*fp32", "*fp32", "tensor_map", "i32", "fp32"), entry="f")
    library.kinds = [ctypes.c_uint64] * 3 + [ctypes.c_int32, ctypes.c_float]
    driver, arguments = CudaDriver(), (x, out, TensorMap(source, 8, 128, 128), 7, 0.5)
    first = driver.prepare(loaded(spec), (4, 2, 1), arguments, True)
    second = driver.rebind(first, {0: y})
    third = driver.rebind(second, {1: other, 0: x})
    del arguments
    for launch in (first, second, third, first):
        launch(5)
    found = [launch["arguments"] for launch in library.launches]
    pointers = [(a.data_ptr(), b.data_ptr()) for a, b in ((x, out), (y, out), (x, other), (x, out))]
    assert [tuple(each[:2]) for each in found] == pointers
    for launch, each in zip(library.launches, found, strict=True):
        assert each[3:] == [7, 0.5] and launch["grid"] == [4, 2, 1] and launch["stream"] == 5
        at = launch["addresses"][2]
        assert at % 64 == 0 and list((ctypes.c_uint64 * 16).from_address(at)) == [*range(1, 17)]
    with pytest.raises(AssertionError, match="not aligned"):
        driver.rebind(first, {0: x.view(-1)[1:]})
    with pytest.raises(AssertionError, match="only pointers"):
        driver.rebind(first, {2: x})


def test_a_launch_is_few_objects_for_garbage_collections_to_walk(library):
    driver, kernel = CudaDriver(), loaded(ADD_ROWS, 12)
    arguments = (torch.zeros(4, 256), torch.zeros(4, 256), 1, 2, 0.5)
    driver.prepare(kernel, (1, 1, 1), arguments, True)  # makes types
    gc.collect()
    before = len(gc.get_objects())
    launches = [driver.prepare(kernel, (1, 1, 1), arguments, True) for _ in range(100)]
    assert len(gc.get_objects()) - before <= 16 * len(launches)


def test_kernels_prefer_shared_memory_and_ask_for_much_and_for_large_clusters(library):
    kernel = CompiledKernel("big", "f", b"", 128, 100 << 10, (), 16, 0, 16, 0)
    CudaDriver().load(kernel)
    asked = [c[1:] for name, c in library.calls if name == "cuFuncSetAttribute"]
    assert [(a.value, b.value) for a, b in asked] == [(8, 100 << 10), (9, 100), (14, 1)]


@pytest.mark.parametrize(
    ("status", "error"), [(2, OutOfMemory), (100, NoDevice), (700, DeviceFailure)]
)
def test_a_status_becomes_a_named_error(library, status, error):
    library.statuses["cuModuleLoadData"] = status
    with pytest.raises(error, match=f"cuModuleLoadData for k: cuGetErrorName {status}") as failure:
        CudaDriver().load(CompiledKernel("k", "f", b"", 32, 0, (), 1, 0, 1, 0))
    assert failure.value.fix


def test_a_refused_launch_names_its_kernel(library):
    library.statuses["cuLaunchKernelEx"] = 1
    spec = KernelSpec("ranks", "x.cu", (), entry="f")
    with pytest.raises(DeviceFailure, match="launching ranks"):
        CudaDriver().prepare(loaded(spec), (0, 1, 1), (), True)(0)


def test_a_machine_without_a_driver_is_named(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", refuse)
    with pytest.raises(NoDevice, match="libcuda.so.1") as failure:
        CudaDriver()
    assert "--backend cpu" in failure.value.fix

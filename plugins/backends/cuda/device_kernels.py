"""What the programs of an engine have in common on a device: kernels, scratch memory, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, PointerTable, TensorMap
from llmctl.plugins.backends.cuda.rebinding import Prepared


class Driver(Protocol):
    """What programs need of `CudaDriver`; tests use a recorder instead."""

    def make_current(self) -> None: ...
    def load(self, kernel: CompiledKernel) -> Any: ...
    def prepare(
        self,
        loaded: Any,
        grid: Sequence[int],
        arguments: Sequence[torch.Tensor | TensorMap | int | float],
        use_pdl: bool,
    ) -> Prepared: ...
    def rebind(self, launch: Any, tensors: Mapping[int, torch.Tensor]) -> Prepared: ...
    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...
    def make_event(self) -> Any: ...


class DeviceKernels:
    """Kernels loaded on a device, and what their launches work in.

    Programs that share it run on one stream, one after the other.
    """

    def __init__(
        self,
        binaries: Iterable[CompiledKernel],
        device: torch.device,
        driver: Driver | None,
        use_pdl: bool,
    ) -> None:
        self.device = device
        self.driver: Driver = driver or cuda_driver(device.index or 0)
        self.use_pdl = use_pdl  # as the binaries were compiled: `compiler.uses_pdl`
        kernels = {kernel.name: kernel for kernel in binaries}
        self._arguments = {name: kernel.arguments for name, kernel in kernels.items()}
        self._loaded = {name: self.driver.load(kernel) for name, kernel in kernels.items()}
        self._scratch: dict[str, torch.Tensor] = {}
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}

    def prepare(self, launch: Launch) -> Prepared:
        """The launch packed, ready to enqueue. Raises CorruptEngine where its kernel is missing."""
        arguments = tuple(
            self._table(a) if isinstance(a, PointerTable) else a for a in launch.arguments
        )
        return self.driver.prepare(self._find(launch.spec), launch.grid, arguments, self.use_pdl)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that name, zeroed when it is first requested (LaunchEnv.scratch)."""
        found = self._scratch.get(name)
        if found is None:
            found = torch.zeros(shape, dtype=dtype, device=self.device)
            if found.is_cuda:  # zeroed on torch's stream, used on a different one
                torch.cuda.current_stream(self.device).synchronize()
            self._scratch[name] = found
        assert tuple(found.shape) == tuple(shape) and found.dtype == dtype, name
        return found

    def _table(self, table: PointerTable) -> torch.Tensor:
        """The addresses in device memory. They are kept as long as the kernels, because a captured
        graph reads them even after its launch has been dropped."""
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in table.tensors)
        if addresses not in self._tables:
            self._tables[addresses] = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        return self._tables[addresses]

    def _find(self, spec: KernelSpec) -> Any:
        loaded = self._loaded.get(spec.name)
        if loaded is None:
            raise CorruptEngine(
                f"the engine has no kernel {spec.name!r}", fix="build the engine again"
            )
        if self._arguments[spec.name] != spec.arguments:
            raise CorruptEngine(
                f"another version of llmctl built the kernel {spec.name!r}: its arguments differ",
                fix="build the engine again",
            )
        return loaded

"""TensorRT's runtime without a GPU: keeps what it is asked, and computes plans with the evaluator.

`make_module()` gives an object with what llmctl uses of the packages' runtime API. A plan is bytes
that `write_plan` made for a network; addresses are those of CPU memory. What is unlawful on a real
runtime (an unbound tensor, a shape outside the profile, scratch memory that is missing) fails here.
`module.faults` makes calls fail on demand.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmctl.builder.tensorrt.networks import PieceNetwork
from support.tensorrt.evaluator import Evaluator, dtype_of

SCRATCH_BYTES = 4096  # of a plan's first profile; each further one takes as much more
ALIGNMENT = {"bytes": 256}  # of every address; memory of a CPU is aligned less
VERSION = "1.7.1"


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(Enum):
    DEVICE, HOST = range(2)


class EngineValidity(Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DynamicShapesKernelSpecializationStrategy(Enum):
    LAZY, EAGER, NONE = range(3)


class CudaGraphStrategy(Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class ILogger(ABC):
    """What a logger derives from; as with TensorRT's, one without `log` must fail."""

    @abstractmethod
    def log(self, severity: Any, message: str) -> None: ...


@dataclass
class Run:
    """One execute_async_v3: the piece, its profile, what was bound, and the stream."""

    piece: str
    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    stream: int


@dataclass
class FakeModule:
    """A package. `faults` holds names of calls that fail: deserialize, context, profile, shape,
    address, execute; or of what is wrong with a plan: version, dtype, mode, alias, location."""

    real: Any  # the package whose networks are evaluated
    name: str = "tensorrt_rtx"
    __version__: str = VERSION
    is_rtx: bool = True
    faults: set[str] = field(default_factory=set)
    is_capturable: bool = True
    runs: list[Run] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    plans: dict[bytes, PieceNetwork] = field(default_factory=dict)
    logger: Any = None

    def __post_init__(self) -> None:
        self.__name__ = self.name
        self.ILogger = ILogger
        self.TensorIOMode, self.TensorLocation = TensorIOMode, TensorLocation
        self.ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
        for dtype in ("float32", "float16", "bfloat16", "fp8", "int32", "bool"):
            setattr(self, dtype, getattr(self.real, dtype))
        if self.is_rtx:
            self.EngineValidity = EngineValidity
            self.CudaGraphStrategy = CudaGraphStrategy
            self.DynamicShapesKernelSpecializationStrategy = (
                DynamicShapesKernelSpecializationStrategy
            )

    def write_plan(self, piece: PieceNetwork) -> bytes:
        """The bytes of a plan for this network."""
        data = f"plan {len(self.plans)} of {piece.name}".encode()
        self.plans[data] = piece
        return data

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802  (TensorRT's name)
        self.logger = logger
        return Runtime(self)

    def fails(self, what: str) -> bool:
        """Whether a call is to fail; the logger hears of it."""
        if what in self.faults:
            self.logger.log("Severity.ERROR", f"no {what} today")
        return what in self.faults


class Runtime:
    def __init__(self, module: FakeModule) -> None:
        self._module = module
        if module.is_rtx:
            self.get_engine_validity = self._validity

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        if self._module.fails("deserialize"):
            return None
        piece = self._module.plans.get(data)
        return None if piece is None else Engine(self._module, piece)

    def _validity(self, data: bytes) -> tuple[EngineValidity, int]:
        is_valid = "version" not in self._module.faults
        return (EngineValidity.VALID if is_valid else EngineValidity.INVALID), 32


class RuntimeCache:
    """What was compiled; takes only what was compiled of the same plan."""

    def __init__(self, piece: str) -> None:
        self._content = f"compiled {piece}".encode()
        self.is_loaded = False

    def deserialize(self, blob: bytes) -> bool:
        self.is_loaded = blob == self._content
        return self.is_loaded

    def serialize(self) -> bytes:
        return self._content


class Engine:
    """A deserialized plan."""

    def __init__(self, module: FakeModule, piece: PieceNetwork) -> None:
        self.module, self.piece = module, piece
        self.evaluator = Evaluator(piece.network, piece.constants)
        self.bindings = {binding.name: binding for binding in piece.bindings}
        self._names = list(self.bindings)
        if "names" in module.faults:
            self._names[0] = "foreign"
        self.num_io_tensors = len(self._names)
        self.device_memory_size_v2 = SCRATCH_BYTES * len(piece.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        is_input = self.bindings[name].is_input != ("mode" in self.module.faults)
        return TensorIOMode.INPUT if is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        if "dtype" in self.module.faults:
            return self.module.int32
        return self._tensor(name).dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        dims = self.bindings[name].shape
        shape = tuple(-1 if isinstance(dim, str) else dim for dim in dims)
        return (*shape, 1) if "rank" in self.module.faults else shape

    def get_tensor_location(self, name: str) -> TensorLocation:
        is_host = "location" in self.module.faults
        return TensorLocation.HOST if is_host else TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return None if "alias" in self.module.faults else self.bindings[name].alias or None

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH_BYTES * (1 + profile)

    def create_runtime_config(self) -> SimpleNamespace:
        config = SimpleNamespace(strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(
            config, "strategy", strategy
        )
        config.create_runtime_cache = lambda: RuntimeCache(self.piece.name)
        config.set_runtime_cache = lambda cache: setattr(config, "cache", cache) or True
        return config

    def create_execution_context(self, how: Any) -> Context | None:
        if self.module.fails("context"):
            return None
        return Context(self, how)

    def _tensor(self, name: str) -> Any:
        network = self.piece.network
        tensors = [network.get_input(i) for i in range(network.num_inputs)]
        tensors += [network.get_output(i) for i in range(network.num_outputs)]
        return next(tensor for tensor in tensors if tensor.name == name)


class Context:
    """One execution context; computes on execute_async_v3 and writes to the bound memory."""

    def __init__(self, engine: Engine, how: Any) -> None:
        self.engine, self.how = engine, how
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch: tuple[int, int] | None = None
        self.num_shape_changes = 0
        self._module = engine.module
        engine.module.contexts.append(self)
        if engine.module.is_rtx:
            self.is_stream_capturable = lambda stream: engine.module.is_capturable

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return not self._module.fails("profile")

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT["bytes"] == 0 and size >= self.engine.device_memory_size_v2
        self.scratch = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._module.fails("shape"):
            return False
        assert self.profile is not None
        profile = self.engine.piece.profiles[self.profile]
        binding = self.engine.bindings[name]
        least, most = profile.shape(binding, 0), profile.shape(binding, 2)
        self.shapes[name] = tuple(shape)
        self.num_shape_changes += 1
        bounds = zip(least, shape, most, strict=True)
        return all(low <= size <= high for low, size, high in bounds)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.bindings and address and address % ALIGNMENT["bytes"] == 0
        self.addresses[name] = address
        return not self._module.fails("address")

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name, binding in self.engine.bindings.items()
            if binding.is_input
            and any(isinstance(dim, str) for dim in binding.shape)
            and (name not in self.shapes or "unspecified" in self._module.faults)
        ]

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch is not None and not self.infer_shapes()
        assert set(self.addresses) == set(self.engine.bindings), "an unbound tensor"
        if self._module.fails("execute"):
            return False
        assert self.profile is not None
        self._module.runs.append(
            Run(
                self.engine.piece.name,
                self.profile,
                dict(self.shapes),
                dict(self.addresses),
                stream,
            )
        )
        self._compute()
        return True

    def _compute(self) -> None:
        evaluator = self.engine.evaluator
        feeds = {}
        for name, tensor in evaluator.inputs.items():
            shape = self.shapes.get(name, self.engine.bindings[name].shape)
            feeds[name] = _view(self.addresses[name], shape, dtype_of(tensor.dtype))
        for name, array in evaluator.run(feeds).items():
            _view(self.addresses[name], array.shape, array.dtype)[...] = array


def _view(address: int, shape: Any, dtype: np.dtype) -> np.ndarray:
    """The memory of this process at an address."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if not num_bytes:
        return np.zeros(shape, dtype)
    raw = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)

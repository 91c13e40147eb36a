"""Serialized plans opened by TensorRT, and checked against the engine's description of them.

Written against the documented API of TensorRT 11 and TensorRT-RTX 1.x; docs/tensorrt.md says what
has been executed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from llmctl.errors import CorruptEngine, RebuildNeeded
from llmctl.plugins.backends.tensorrt.layers import tensorrt_dtype
from llmctl.plugins.backends.tensorrt.packages import last_error
from llmctl.plugins.core.cache_home import cache_home
from llmctl.publish import write_cached

REBUILD = "build the engine again"


class PieceFormat(Protocol):
    """An engine's description of a plan; `builder.engine_format.TrtPiece` is one."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def bindings(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def profiles(self) -> Sequence[Mapping[str, Any]]: ...


class OpenedPlan:
    """A deserialized plan whose bindings are those that the engine describes."""

    def __init__(self, trt: Any, runtime: Any, piece: PieceFormat, data: bytes) -> None:
        """Raises RebuildNeeded for a plan of another version, CorruptEngine for one that cannot be
        read or has other bindings."""
        self.trt, self.piece = trt, piece
        _require_version(trt, runtime, piece, data)
        self.engine = runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise CorruptEngine(
                f"{trt.__name__} {trt.__version__} cannot open the plan {piece.name}"
                + last_error(trt),
                fix=REBUILD,
            )
        self._check_bindings()
        self._compiled = _CompiledKernels.of(trt, data)
        self._config: Any = None
        self.symbolic = {  # inputs whose shape a step decides
            b["name"]: tuple(b["shape"])
            for b in piece.bindings
            if b["is_input"] and any(isinstance(dim, str) for dim in b["shape"])
        }

    @property
    def scratch_bytes(self) -> int:
        """Device memory that any of its profiles needs while it runs."""
        engine = self.engine
        sizes = [
            engine.get_device_memory_size_for_profile_v2(index)
            for index in range(len(self.piece.profiles))
        ]
        return int(max([engine.device_memory_size_v2, *sizes]))

    def choose_profile(self, sizes: Mapping[str, int]) -> int:
        """The narrowest profile that holds these sizes. Raises CorruptEngine: the profiles of a
        plan hold every step within the engine's limits."""
        found: list[tuple[int, int]] = []
        for index, profile in enumerate(self.piece.profiles):
            bounds = [(size, profile["sizes"][dim]) for dim, size in sizes.items()]
            if all(low <= size <= high for size, (low, _, high) in bounds):
                found.append((math.prod(max(1, high) for _, (_, _, high) in bounds), index))
        if not found:
            raise CorruptEngine(
                f"no profile of the plan {self.piece.name} holds {dict(sizes)}", fix=REBUILD
            )
        return min(found)[1]

    def _check_bindings(self) -> None:
        """Raise CorruptEngine where the plan's tensors are not those that the engine describes."""
        trt, engine = self.trt, self.engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        wanted = {binding["name"]: binding for binding in self.piece.bindings}
        if set(names) != set(wanted):
            odd = sorted(set(names) ^ set(wanted))[0]
            raise self._mismatch(odd, f"is {'not described' if odd in names else 'absent'}")
        for name, binding in wanted.items():
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            if is_input != binding["is_input"]:
                raise self._mismatch(name, f"is an {'input' if is_input else 'output'}")
            if engine.get_tensor_dtype(name) != tensorrt_dtype(trt, binding["dtype"]):
                raise self._mismatch(
                    name, f"is {engine.get_tensor_dtype(name)}, wanted {binding['dtype']}"
                )
            shape = tuple(engine.get_tensor_shape(name))
            dims = tuple(-1 if isinstance(dim, str) else dim for dim in binding["shape"])
            if shape != dims:
                raise self._mismatch(name, f"has shape {shape}, wanted {dims}")
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise self._mismatch(name, "lies in host memory")
            alias = engine.get_aliased_input_tensor(name) if binding["alias"] else None
            if (alias or "") != binding["alias"]:
                raise self._mismatch(name, f"shares {alias}, wanted {binding['alias']}")

    def _mismatch(self, name: str, what: str) -> CorruptEngine:
        return CorruptEngine(f"plan {self.piece.name}: binding {name!r} {what}", fix=REBUILD)

    def create_context(self) -> Any:
        """An execution context that uses our scratch memory; None if TensorRT cannot create one."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._compiled is None:
            return self.engine.create_execution_context(strategy)
        if self._config is None:
            self._config = self._compiled.configure(self.engine, strategy)
        return self.engine.create_execution_context(self._config)

    def keep_compiled(self) -> None:
        """Keep what was compiled for this plan on this GPU for the next process."""
        if self._compiled is not None:
            self._compiled.keep()


class _CompiledKernels:
    """What TensorRT-RTX compiles when it loads a plan: once for all contexts, and cached in a file
    that it checks against the GPU, the driver and its own version."""

    def __init__(self, trt: Any, path: Path) -> None:
        self._trt = trt
        self._path = path
        self._cache: Any = None

    @classmethod
    def of(cls, trt: Any, data: bytes) -> _CompiledKernels | None:
        """Those of one plan; None for full TensorRT, whose plans are compiled when built."""
        if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            return None
        return cls(trt, cache_folder() / f"{hashlib.sha256(data).hexdigest()}.compiled")

    def configure(self, engine: Any, strategy: Any) -> Any:
        """The configuration of an engine's contexts: kernels that do not change under a captured
        graph, and no graphs but ours."""
        trt, config = self._trt, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # None: a kernel that is replaced when a better one is compiled changes bits midway, and to
        # compile one for every length of a prompt stops each of them.
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.NONE
        )
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        self._cache = config.create_runtime_cache()
        with suppress(OSError):  # nothing kept yet
            self._cache.deserialize(self._path.read_bytes())  # refuses another machine's
        config.set_runtime_cache(self._cache)
        return config

    def keep(self) -> None:
        """Write the file; a folder that cannot be written costs time, not correctness."""
        if self._cache is not None:
            write_cached(self._path, bytes(self._cache.serialize()))


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/llmctl/tensorrt, else below ~/.cache."""
    return cache_home() / "llmctl" / "tensorrt"


def _require_version(trt: Any, runtime: Any, piece: PieceFormat, data: bytes) -> None:
    """Plans are for the version that built them; TensorRT-RTX can say more about one."""
    if piece.version == trt.__version__:
        return
    said = ""
    if hasattr(runtime, "get_engine_validity"):
        validity, diagnostics = runtime.get_engine_validity(data)
        if validity != trt.EngineValidity.INVALID:
            return
        said = f" (diagnostics {diagnostics})"
    raise RebuildNeeded(
        f"the plan {piece.name} was built by {trt.__name__} {piece.version}; "
        f"{trt.__version__} is installed and cannot run it{said}",
        fix=f"pip install '{trt.__name__.replace('_', '-')}=={piece.version}', or " + REBUILD,
    )

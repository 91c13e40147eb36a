"""TensorRT plans, opened once, bound and enqueued step by step.

A plan holds kernels only: weights are bindings like activations, so the same plan serves every
layer of a model with other addresses. Each profile of each plan has one execution context, and all
contexts share one scratch buffer, because everything runs on one stream, one after the other.

Written against the documented API of TensorRT 11 and TensorRT-RTX 1.x; docs/tensorrt.md says what
has been executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmctl.errors import CorruptEngine, DeviceFailure, OutOfMemory, RebuildNeeded
from llmctl.plugins.tensorrt.layers import tensorrt_dtype
from llmctl.plugins.tensorrt.library import last_error, shared_logger

if TYPE_CHECKING:
    import torch

ADDRESS_ALIGNMENT = 256  # bytes, of every binding and of scratch memory (TensorRT's documentation)
Shape = tuple[int, ...]
_REBUILD = "build the engine again"


class PieceFormat(Protocol):
    """What an engine says of a plan; `builder.engine_format.TrtPiece` is one."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def bindings(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def profiles(self) -> Sequence[Mapping[str, Any]]: ...


class OpenedPlan:
    """A deserialized plan whose bindings are those that the engine promises."""

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
                fix=_REBUILD,
            )
        self._check_bindings()
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
                f"no profile of the plan {self.piece.name} holds {dict(sizes)}", fix=_REBUILD
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
        return CorruptEngine(f"plan {self.piece.name}: binding {name!r} {what}", fix=_REBUILD)


class Context:
    """One profile of a plan, ready to be enqueued; remembers what it was last told."""

    def __init__(self, plan: OpenedPlan, profile: int, stream: int) -> None:
        """Raises OutOfMemory and DeviceFailure."""
        self.plan, self.profile = plan, profile
        self._context = _create_context(plan.trt, plan.engine)
        if self._context is None:
            raise OutOfMemory(
                f"no execution context for the plan {plan.piece.name}{last_error(plan.trt)}",
                fix="lower --kv-cache-free-gpu-memory-fraction",
            )
        self._require(
            self._context.set_optimization_profile_async(profile, stream), f"profile {profile}"
        )
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def set_scratch(self, address: int, num_bytes: int) -> None:
        """Use this device memory, on a multiple of 256, whenever the context runs."""
        self._context.set_device_memory(address, num_bytes)

    def is_capturable(self, stream: int) -> bool:
        """Whether its work may be captured in a CUDA graph now (RTX may still be compiling)."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))

    def run(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], stream: int) -> None:
        """Bind what differs from the last run and enqueue. Raises DeviceFailure, CorruptEngine."""
        has_new_shape = False
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                accepted = self._context.set_input_shape(name, shape)
                self._require(accepted, f"shape {shape} of {name}")
                self._shapes[name] = shape
                has_new_shape = True
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                assert address % ADDRESS_ALIGNMENT == 0, f"{name} lies at {address:#x}"
                accepted = self._context.set_tensor_address(name, address)
                self._require(accepted, f"an address for {name}")
                self._addresses[name] = address
        if has_new_shape and (missing := self._context.infer_shapes()):
            raise CorruptEngine(
                f"plan {self.plan.piece.name}: nobody gives the shape of {', '.join(missing)}",
                fix=_REBUILD,
            )
        self._require(self._context.execute_async_v3(stream), "to run")

    def _require(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise DeviceFailure(
                f"plan {self.plan.piece.name}: TensorRT refuses {what}" + last_error(self.plan.trt),
                fix="start again; if it happens again, " + _REBUILD,
            )


class PlanSet:
    """Every plan of one engine, a context for each profile, and their common scratch memory.

    `allocate` gives device memory (uint8). `stream` is where everything will run.
    """

    def __init__(
        self,
        trt: Any,
        pieces: Sequence[PieceFormat],
        data: Mapping[str, bytes],
        allocate: Callable[[int], torch.Tensor],
        stream: int,
    ) -> None:
        """data: serialized plans by the name of their piece. Raises what opening them raises."""
        self._runtime = trt.Runtime(shared_logger(trt))  # must outlive its engines
        self.plans = {
            piece.name: OpenedPlan(trt, self._runtime, piece, data[piece.name]) for piece in pieces
        }
        self.contexts = {
            name: [Context(plan, index, stream) for index in range(len(plan.piece.profiles))]
            for name, plan in self.plans.items()
        }
        num_bytes = max(plan.scratch_bytes for plan in self.plans.values())
        self._scratch = allocate(max(num_bytes, ADDRESS_ALIGNMENT))
        assert self._scratch.data_ptr() % ADDRESS_ALIGNMENT == 0
        for contexts in self.contexts.values():
            for context in contexts:
                context.set_scratch(self._scratch.data_ptr(), num_bytes)

    def choose(self, piece: str, sizes: Mapping[str, int]) -> Context:
        """The context that a step of these sizes runs in."""
        return self.contexts[piece][self.plans[piece].choose_profile(sizes)]

    def is_capturable(self, stream: int) -> bool:
        """Whether steps may be captured now."""
        everyone = [c for contexts in self.contexts.values() for c in contexts]
        return all(context.is_capturable(stream) for context in everyone)


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
        fix=f"pip install '{trt.__name__.replace('_', '-')}=={piece.version}', or " + _REBUILD,
    )


def _create_context(trt: Any, engine: Any) -> Any:
    """A context whose scratch memory is ours, whose kernels do not change under a captured graph,
    and which captures no graphs of its own."""
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):  # RTX alone compiles at run
        return engine.create_execution_context(strategy)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy)
    # None: a kernel that is replaced when a better one is compiled changes bits midway, and to
    # compile one for every length of a prompt stops each of them.
    config.dynamic_shapes_kernel_specialization_strategy = (
        trt.DynamicShapesKernelSpecializationStrategy.NONE
    )
    config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
    return engine.create_execution_context(config)

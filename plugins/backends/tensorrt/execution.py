"""TensorRT plans bound and enqueued step by step.

A plan contains only kernels: weights are bindings like activations, so the same plan serves every
layer of a model with different addresses. Step sizes that recur (generation, verification) have an
execution context each, so that only addresses change while they are captured in a graph; all others
share one context per profile. All contexts share one scratch buffer, because everything runs on one
stream, one after another.

Written against the documented API of TensorRT 11 and TensorRT-RTX 1.x; docs/tensorrt.md says what
has been executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmctl.errors import CorruptEngine, DeviceFailure, OutOfMemory
from llmctl.plugins.backends.tensorrt.opened import REBUILD, OpenedPlan, PieceFormat
from llmctl.plugins.backends.tensorrt.packages import last_error, shared_logger

if TYPE_CHECKING:
    import torch

ADDRESS_ALIGNMENT = 256  # bytes, of every binding and of scratch memory (TensorRT's documentation)
KERNELS_OF_OWN_CONTEXTS = 2048  # in all contexts of one plan that have sizes of their own
Shape = tuple[int, ...]
Sizes = tuple[tuple[str, int], ...]


class Context:
    """One profile of a plan, ready to be enqueued; remembers the last shapes and addresses it was
    given."""

    def __init__(self, plan: OpenedPlan, profile: int, stream: int) -> None:
        """Raises OutOfMemory and DeviceFailure."""
        self.plan, self.profile = plan, profile
        self._context = plan.create_context()
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
                fix=REBUILD,
            )
        self._require(self._context.execute_async_v3(stream), "to run")

    def _require(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise DeviceFailure(
                f"plan {self.plan.piece.name}: TensorRT refuses {what}" + last_error(self.plan.trt),
                fix="start again; if it happens again, " + REBUILD,
            )


class PlanSet:
    """Every plan of one engine, their contexts, and the contexts' common scratch memory.

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
        self._stream = stream
        self.plans = {
            piece.name: OpenedPlan(trt, self._runtime, piece, data[piece.name]) for piece in pieces
        }
        self._num_bytes = max(plan.scratch_bytes for plan in self.plans.values())
        self._scratch = allocate(max(self._num_bytes, ADDRESS_ALIGNMENT))
        assert self._scratch.data_ptr() % ADDRESS_ALIGNMENT == 0
        self._shared = {
            (name, index): self._make(plan, index)
            for name, plan in self.plans.items()
            for index in range(len(plan.piece.profiles))
        }
        self._own: dict[tuple[str, Sizes], Context] = {}
        for plan in self.plans.values():
            plan.keep_compiled()

    def keep(self, piece: str, sizes: Mapping[str, int]) -> bool:
        """Whether steps of these sizes have their own context from now on; False if the plan has
        the most it may have. The context may be created now, so not while a stream is captured."""
        plan, key = self.plans[piece], (piece, tuple(sorted(sizes.items())))
        if key in self._own:
            return True
        kernels = max(len(profile["layers"]) for profile in plan.piece.profiles)
        have = sum(name == piece for name, _ in self._own)
        if (have + 1) * kernels > KERNELS_OF_OWN_CONTEXTS:
            return False
        self._own[key] = self._make(plan, plan.choose_profile(sizes))
        return True

    def choose(self, piece: str, sizes: Mapping[str, int]) -> Context:
        """The context that a step of these sizes runs in."""
        own = self._own.get((piece, tuple(sorted(sizes.items()))))
        return own or self._shared[piece, self.plans[piece].choose_profile(sizes)]

    def is_capturable(self, stream: int) -> bool:
        """Whether steps may be captured now."""
        everyone = (*self._shared.values(), *self._own.values())
        return all(context.is_capturable(stream) for context in everyone)

    def _make(self, plan: OpenedPlan, profile: int) -> Context:
        context = Context(plan, profile, self._stream)
        context.set_scratch(self._scratch.data_ptr(), self._num_bytes)
        return context

"""TensorRT plans as operators: called by `plugins.backends.cuda.program` for the operator
"tensorrt"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llmctl.plugins.backends.tensorrt.execution import Context, PlanSet, Shape
from llmctl.plugins.backends.tensorrt.opened import OpenedPlan

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits, StepShape
    from llmctl.plugins.core.calls import Extent, OpCall


class PieceRunner:
    """Runs the calls of the operator "tensorrt": one piece each, with the call's tensors bound."""

    def __init__(self, plans: PlanSet) -> None:
        self._plans = plans

    def extents(self, call: OpCall) -> Mapping[str, Extent]:
        """Whether each output has the step's tokens or its rows."""
        piece = self._plans.plans[str(call.attributes["piece"])].piece
        return {
            b["name"]: "rows" if b["shape"][0] == "rows" else "tokens"
            for b in piece.bindings
            if not b["is_input"]
        }

    def prepare(
        self, call: OpCall, env: LaunchEnv, shape: StepShape
    ) -> list[Callable[[int], None]]:
        """The run of a piece, or nothing where the step has no row that the piece computes."""
        name = str(call.attributes["piece"])
        plan = self._plans.plans[name]
        sizes = {"tokens": shape.num_tokens, "rows": shape.num_rows}
        used = {dim for dims in plan.symbolic.values() for dim in dims if isinstance(dim, str)}
        if any(sizes[dim] == 0 for dim in used):
            return []
        shapes = {
            binding: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
            for binding, dims in plan.symbolic.items()
        }
        wanted = {dim: sizes[dim] for dim in used}
        if _comes_back(shape, env.limits):
            self._plans.keep(name, wanted)
        context = self._plans.choose(name, wanted)
        return [_Run(context, shapes, _addresses(plan, call, env))]


class _Run:
    """One piece with its bindings; called with a stream it is enqueued there."""

    __slots__ = ("_addresses", "_context", "_shapes")

    def __init__(
        self, context: Context, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        self._context = context
        self._shapes = shapes
        self._addresses = addresses

    def __call__(self, stream: int) -> None:
        self._context.run(self._shapes, self._addresses, stream)


def _comes_back(shape: StepShape, limits: StepLimits) -> bool:
    """Whether graphs are captured for such steps: generation, verification, and what a draft engine
    reads after all its drafts were accepted, padded to a batch size (`graphs.Buckets`)."""
    requests = shape.num_requests
    is_short = shape.max_query_len <= max(limits.max_draft_len + 1, 2)
    is_uniform = shape.num_tokens == requests * shape.max_query_len
    is_padded = requests & (requests - 1) == 0 or requests == limits.max_batch_size
    has_rows = shape.num_rows in (requests, shape.num_tokens)
    return is_short and is_uniform and is_padded and has_rows


def _addresses(plan: OpenedPlan, call: OpCall, env: LaunchEnv) -> dict[str, int]:
    """Where each binding lies. Inputs that the call does not have are arrays of the step."""
    tensors = {**call.inputs, **call.outputs}
    return {
        name: (tensors[name] if name in tensors else getattr(env.step, name)).data_ptr()
        for name in (binding["name"] for binding in plan.piece.bindings)
    }

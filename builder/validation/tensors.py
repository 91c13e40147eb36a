"""The tensors of a plan: shapes, dtypes, and the place of each activation in the arena."""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmctl.builder.container import DTYPES
from llmctl.builder.plan import Dim, Plan, PlanTensor
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.strict_json import MOST
from llmctl.plugins.backends.backend import Backend

MOST_BYTES = 2**50  # of an arena, or of a weight: a petabyte
MOST_PRODUCTS = 2**62  # of a product's multiplications, which kernels count in 64 bits
STEP = "step."  # prefix of the names of a step's arrays, which are no tensors of a plan
_Form = tuple[str, str, tuple[Dim, ...]]


def check_tensors(plan: Plan, backend: Backend) -> dict[str, PlanTensor]:
    """Every tensor by its name. Raises CorruptEngine.

    A weight has a shape of numbers; an activation begins with a symbol of `Plan.sizes`, lies on a
    multiple of the backend's alignment, and the arena ends where the last of them does.
    """
    rows = plan.sizes
    heads = (plan.max_num_requests, plan.max_num_beams)
    has_heads = all(0 <= count <= plan.max_num_rows for count in heads)
    if not (has_heads and 1 <= plan.max_num_rows <= plan.max_num_tokens <= MOST):
        raise wrong(f"the plan has steps of {rows}; 1 to {MOST} tokens and no more rows are wanted")
    if not 0 <= plan.scratch_bytes <= MOST_BYTES:
        raise wrong(f"scratch_bytes is {plan.scratch_bytes}; at most {MOST_BYTES} are wanted")
    found: dict[str, PlanTensor] = {}
    sizes: dict[_Form, int] = {}
    alignment, end = backend.arena_alignment, 0
    for tensor in plan.tensors:
        form = (tensor.kind, tensor.dtype, tensor.shape)
        num_bytes = sizes.get(form)
        if num_bytes is None:
            num_bytes = sizes[form] = _num_bytes(tensor, rows)
        if tensor.kind == "activation":
            offset = tensor.offset
            if offset is None or offset < 0 or offset % alignment:
                raise wrong(
                    f"activation {tensor.name!r} lies at {offset}; a multiple of {alignment} is "
                    "wanted"
                )
            if not tensor.is_stored:
                raise wrong(f"activation {tensor.name!r} is marked as generated")
            end = max(end, offset + num_bytes)
        elif tensor.offset is not None:
            raise wrong(f"weight {tensor.name!r} has a place in the arena")
        found[tensor.name] = tensor
    if len(found) != len(plan.tensors):
        raise wrong(f"the plan has {len(plan.tensors)} tensors of {len(found)} names")
    if wanted := [name for name in found if not name or name.startswith((STEP, "__"))]:
        raise wrong(f"a tensor is called {wanted[0]!r}, which names something else")
    arena = -(-end // alignment) * alignment
    if plan.arena_bytes != arena or arena > MOST_BYTES:
        raise wrong(f"arena_bytes is {plan.arena_bytes}; the activations end at {arena}")
    return found


def _num_bytes(tensor: PlanTensor, rows: Mapping[str, int]) -> int:
    """Bytes at the largest step. Raises CorruptEngine for a shape or dtype that none has."""
    if tensor.dtype not in DTYPES:
        raise wrong(
            f"tensor {tensor.name!r} has dtype {tensor.dtype!r}; one of {', '.join(DTYPES)} is "
            "wanted"
        )
    is_weight, shape = tensor.kind == "weight", tensor.shape
    first, rest = (None, shape) if is_weight else (shape[:1], shape[1:])
    is_sound = all(type(dim) is int and 1 <= dim <= MOST for dim in rest) and len(shape) > 0
    if not is_sound or (first is not None and first[0] not in rows):
        wanted = "sizes" if is_weight else f"{' or '.join(rows)} first, then sizes"
        raise wrong(f"{tensor.kind} {tensor.name!r} has shape {list(shape)}; {wanted} are wanted")
    numbers = [rows[dim] if isinstance(dim, str) else dim for dim in shape]
    elements = math.prod(numbers)
    num_bytes = elements * DTYPES[tensor.dtype][1]
    most = elements * rows["tokens"] if is_weight else 0
    if num_bytes > MOST_BYTES or most > MOST_PRODUCTS:
        raise wrong(f"{tensor.kind} {tensor.name!r} has shape {list(shape)}, beyond all memory")
    return num_bytes

"""The shapes and dtypes of what a head reads and gives."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.plan import Dim, PlanTensor
from llmctl.builder.validation.errors import wrong

Tensors = Mapping[str, PlanTensor]
Form = tuple[Dim, ...]  # a shape, then a dtype


def require_forms(
    graph: str, kind: str, found: Mapping[str, str], wanted: Mapping[str, Form], tensors: Tensors
) -> None:
    """Raise CorruptEngine where an input or output of a head has another form than is wanted."""
    for name, form in wanted.items():
        tensor = tensors[found[name]]
        own = (*tensor.shape, tensor.dtype)
        if own != form:
            raise wrong(f"{kind} {name!r} of head {graph!r} is {own}; {form} is wanted")
